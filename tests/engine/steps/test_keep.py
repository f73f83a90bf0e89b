"""Which micro-batches keep layers, and what then counts as held."""

import pytest

from tests.engine.test_kept_layers import update
from tests.support import make_engine, save_tiny_model
from verl_pg_plugin.engine.steps import keep

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))


def test_a_part_of_a_chain_that_has_no_room_for_attention_has_none_for_layers(qwen3: str, monkeypatch) -> None:
    engine = make_engine(qwen3, packed=True, engine={"keep_activations": "all"})
    assert update(engine)[0]["prefix_grouper/kept_layers"] != [0.0]
    monkeypatch.setattr(keep, "recomputes_attention", lambda micro_batch: True)
    assert update(engine)[0]["prefix_grouper/kept_layers"] == [0.0]


def test_attentions_output_counts_as_held_where_padding_has_copied_it(qwen3: str) -> None:
    """A recomputed layer holds what the kernel returned, and not that copy of it."""
    held = {}
    for static_rows in (False, True):
        engine = make_engine(qwen3, packed=True, engine={"keep_activations": 1, "static_rows": static_rows})
        update(engine)
        (held[static_rows],) = engine.keeper.budget.bytes_per_row.values()
    assert held[True] == held[False] + 4 * 8 * 4, "of a row: four heads of eight float32"
