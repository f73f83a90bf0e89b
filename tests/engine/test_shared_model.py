"""Layers are counted, so that one that mixes tokens by other means is an error."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from verl_pg_plugin.engine.shared_model import SharedModel

from verl_pg_plugin.planning.cost import ModelFlops

MODEL = SharedModel("Tiny", Counter(attention=2), ModelFlops(1.0, 1.0, ()), saved_attention=None)


def rows_after(calls: int) -> Any:
    return SimpleNamespace(shared=SimpleNamespace(calls=Counter(attention=calls)))


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_layer_that_attends_never_or_twice_is_an_error(calls: int) -> None:
    with pytest.raises(RuntimeError, match=f"attention over shared prefixes ran in {calls} of 2 layers of Tiny"):
        MODEL.check_every_layer_mixed(rows_after(calls))
    MODEL.check_every_layer_mixed(rows_after(2))
