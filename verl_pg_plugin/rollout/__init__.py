"""Rollouts that share prompts: a router, shared decode in vLLM and a replay buffer with a short poll interval."""

from packaging.specifiers import SpecifierSet

SHARED_DECODE = "verl_pg_plugin_shared_decode"
"""Key of vLLM's ``additional_config`` that enables shared decode."""
VLLM_VERSIONS = SpecifierSet(">=0.24,<0.27,!=0.25.*")
"""Versions whose attention backend ``shared_decode`` extends. It has not run with 0.25."""


def register_with_vllm() -> None:
    """Replace vLLM's FlashAttention backend by ours; vLLM calls this in each of its processes.

    Without ``SHARED_DECODE`` in ``additional_config``, ours runs vLLM's code. Nothing is replaced on other platforms
    and vLLM versions, or if another plugin has replaced the backend.
    """
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    supported = current_platform.is_cuda() and vllm.__version__ in VLLM_VERSIONS
    if supported and not AttentionBackendEnum.FLASH_ATTN.is_overridden():
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.shared_decode.SharedDecodeBackend")
