"""The doctor reads overrides as the trainer does."""

import pytest
from verl_pg_plugin.cli.command import CommandError
from verl_pg_plugin.cli.doctor.overrides import compose_config, settings

from tests.cli.doctor.support import ACTOR, CPU_ONLY

pytestmark = CPU_ONLY


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ACTOR}.strategy=[", "strategy=["),
        (f"{ACTOR}.clip_ratio=${{no.such.key}}", "no.such.key"),
        ("model_engine=no_such_engine", "no_such_engine"),
    ],
    ids=["parse", "interpolation", "group"],
)
def test_every_kind_of_wrong_override_is_one_line(override: str, message: str) -> None:
    with pytest.raises(CommandError) as caught:
        compose_config([override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_modes_and_kernel_follow_the_overrides(packed: list[str]) -> None:
    section = settings(compose_config(packed))
    rows = {row[0]: row[1] for row in section.rows}
    assert section.problems == ()
    assert rows["mode"].startswith("packed (")
    assert rows["attention kernel"].startswith("sdpa (")
    stock = settings(compose_config([*packed, f"{ACTOR}.use_prefix_grouper=False"]))
    rows = {row[0]: row[1] for row in stock.rows}
    assert rows["mode"].startswith("rmpad (")
    assert "attention kernel" not in rows


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "prefix_grouper.keep_activations=attention",
            "attention's outputs are kept (prefix_grouper.keep_activations=a",
        ),
        ("prefix_grouper.keep_activations=12.5", "layers of up to 12.5 GiB are kept"),
        ("prefix_grouper.keep_activations=auto", "as many layers as the device has memory for"),
        ("prefix_grouper.recompute_attention=True", "all recomputed"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=False", "all kept"),
    ],
)
def test_the_doctor_says_what_the_backward_finds_kept(packed: list[str], override: str, said: str) -> None:
    section = settings(compose_config([*packed, override]))
    assert section.problems == ()
    assert said in dict(section.rows)["activations of the actor"]


def test_the_doctor_tells_whether_layers_would_be_compiled_and_why(packed: list[str]) -> None:
    def row(*overrides: str) -> str:
        rows = {row[0]: row[1] for row in settings(compose_config([*packed, *overrides])).rows}
        return rows.get("compiled layers of the actor", "")

    assert row().startswith("no (prefix_grouper.compile_layers=auto: compiling pays on a GPU")
    assert row("prefix_grouper.compile_layers=True").startswith("yes (")
    assert "flat parameters" in row(f"{ACTOR}.strategy=fsdp")
    assert not row(f"{ACTOR}.use_prefix_grouper=False")


def test_what_verl_itself_rejects_is_a_problem(packed: list[str]) -> None:
    (problem,) = settings(compose_config([*packed, f"{ACTOR}.loss_agg_mode=no-such-mode"])).problems
    assert problem.what.startswith("verl's own validation refuses it:")
    assert "no-such-mode" in problem.what
