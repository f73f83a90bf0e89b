"""Rollouts that share prompts: a router, decode that reads a shared prefix once, and a sampler that does not wait."""

from packaging.specifiers import SpecifierSet

SHARED_DECODE = "verl_pg_plugin_shared_decode"
"""Key of vLLM's ``additional_config`` that switches shared decode on."""
VLLM_VERSIONS = SpecifierSet(">=0.24,<0.25")
"""Versions whose attention backend ``shared_decode`` extends."""


def register_with_vllm() -> None:
    """Let vLLM build our backend in place of its FlashAttention one; vLLM calls this in each of its processes.

    Without ``SHARED_DECODE`` in the engine's ``additional_config`` our backend runs vLLM's own code. Other platforms,
    other versions of vLLM and a backend that somebody else has registered are left alone.
    """
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    supported = current_platform.is_cuda() and vllm.__version__ in VLLM_VERSIONS
    if supported and not AttentionBackendEnum.FLASH_ATTN.is_overridden():
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.shared_decode.SharedDecodeBackend")
