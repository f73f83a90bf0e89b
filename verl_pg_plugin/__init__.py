"""RL training in verl that computes every shared prompt once and never a padding token.

verl imports this package in each of its processes (entry point group ``verl.plugins``). The import registers the
engines, and on request the CPU default, with verl's registries; it starts no CUDA context and imports no attention
kernels and no vLLM. verl swallows an exception here, so ``PrefixGrouperEngineConfig`` checks again that the engines are
in force.
"""

import logging

from verl_pg_plugin import cpu

__version__ = "0.1.0"

cpu.register()

from verl_pg_plugin.engine.registration import register_engines  # noqa: E402  (verl asks for the platform on import)

register_engines()
logging.getLogger(__name__).info("verl_pg_plugin %s: engines registered for fsdp and fsdp2", __version__)
