"""For a model with capped scores one kernel is imported and tried: the one that is taken."""

from typing import Any

import pytest
import torch

from verl_pg_plugin.attention import kernels, passes
from verl_pg_plugin.attention.kernels import AttentionNeeds, KernelSpec, select_kernel

CAPPED = AttentionNeeds(head_dims=frozenset({(64, 64)}), softcap=True)


@pytest.mark.parametrize(("asked", "taken"), [("auto", "flash_attn_4"), ("flash_attn_2", "flash_attn_2")])
def test_no_other_kernel_is_imported_or_compiled(asked: str, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 4 compiles for minutes, and was not asked for."""
    tried: list[str] = []

    def load(name: str) -> Any:
        tried.append(name)
        return None, None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(KernelSpec, "installed", True)
    monkeypatch.setattr(kernels, "load_passes", load)
    monkeypatch.setattr(passes, "softcap_fault", lambda *asked: "")
    assert select_kernel(asked, "cuda", CAPPED).name == taken
    assert set(tried) == {taken}
