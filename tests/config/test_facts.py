"""Of several keys for one thing, the one that verl lets win."""

from __future__ import annotations

import pytest

from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.facts import Facts, Role, effective_sp_size

ACTOR = "actor_rollout_ref.actor"
DEPRECATED, OWN = f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"


@pytest.mark.parametrize(
    ("settings", "size"),
    [({}, 1), ({OWN: 2}, 2), ({DEPRECATED: 2}, 2), ({DEPRECATED: 1, OWN: 4}, 4), ({DEPRECATED: 2, OWN: 4}, 2)],
)
def test_verls_deprecated_size_wins_where_it_is_above_one(make_config, settings: dict[str, int], size: int) -> None:
    assert effective_sp_size(make_config(Mode.PACKED, settings), Role.ACTOR) == size


def test_a_critics_engine_reads_its_own_section_alone(make_config) -> None:
    config = make_config(Mode.PACKED, {"critic.fsdp.ulysses_sequence_parallel_size": 2})
    facts = Facts.from_hydra(config, Role.CRITIC)
    assert [setting.key for setting in facts.settings["sp_size"]] == ["critic.fsdp.ulysses_sequence_parallel_size"]
    assert facts.value("sp_size") == 2
    assert facts.value("use_dynamic_bsz") is True, "no key of the critic's holds it"
