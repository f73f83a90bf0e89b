"""Differences between the contract and what is installed are reported readably, and only where they matter."""

import pytest
from verl_pg_plugin.contract.table import EXISTS, Part, differences, signature_of
from verl_pg_plugin.contract.verl import changes


def test_a_changed_signature_is_reported_readably(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils import ulysses

    def gather_heads_scatter_seq(x, head_dim, seq_dim, group=None, *, overlap=True):
        return x

    monkeypatch.setattr(ulysses, "gather_heads_scatter_seq", gather_heads_scatter_seq)
    (message,) = changes()
    assert message.startswith(
        "verl.utils.ulysses.gather_heads_scatter_seq takes (x, head_dim, seq_dim, group=None, *, overlap=True) "
        "instead of (x, head_dim, seq_dim, group=None) in verl "
    )
    assert message.endswith(
        "we know verl 0.9.1; needed by attention/ulysses.py, engine/batch/row_shard.py, models/packed_inputs.py"
    )


def test_a_config_may_gain_fields_and_may_not_lose_one_that_we_read() -> None:
    part = Part("verl.workers.config.FSDPEngineConfig", "(strategy, pad_to_length, ...)", ("engine/x.py",), "0.9.1")
    assert differences([part]) == []
    gone = Part("verl.workers.config.FSDPEngineConfig", "(strategy, no_such_field, ...)", ("engine/x.py",), "0.9.1")
    (message,) = differences([gone])
    assert "FSDPEngineConfig no longer takes no_such_field in verl" in message


def test_a_module_that_moved_is_reported() -> None:
    (message,) = differences([Part("verl.utils.no_such_module.function", "()", ("engine/x.py",), "0.9.1")])
    assert message.startswith("verl.utils.no_such_module.function is gone from verl ")
    assert message.endswith("needed by engine/x.py")


def test_a_part_that_needs_a_missing_package_is_not_looked_at() -> None:
    assert differences([Part("verl.no_such_name", "()", ("engine/x.py",), "0.9.1", needs="no_such_package")]) == []


def test_signatures_are_written_without_annotations() -> None:
    def function(a: int, *rest: str, b: float = 0.5, **options: object) -> None:
        """Annotated."""

    assert signature_of(function) == "(a, *rest, b=0.5, **options)"
    assert signature_of({}) == EXISTS
