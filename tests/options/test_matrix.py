"""Every option alone, and every two that meet in the code: exact against each sequence alone.

The quick tests run pairs on two ranks, in tests/options/test_ranks.py, with many of them in one case; the slow ones run
each by itself, which tells who is to blame.
"""

import re
from pathlib import Path

import pytest

from tests.config.config_support import compose_config, runnable, save_checkpoint
from tests.engine.ranks import graphs_as_they_are
from tests.options.harness import Engines, assert_exact, batch_of, loss_of
from tests.options.option import Case, Place, alone, covering, pairs, split
from tests.options.table import DEFAULT, OPTIONS, case_of
from tests.support import assert_same, check_exact, critic_batch, make_engine, run_engine
from verl_pg_plugin.config.preflight import sharing_issues

ON_ONE_PROCESS = [option for option in OPTIONS if option.num_ranks == 1 and not option.needs_gpu]
QUICK = [option for option in ON_ONE_PROCESS if not option.compiles]
# verl gives peft the task of a causal LM, which it cannot put adapters for on a token classifier.
OF_CRITICS = [option for option in QUICK if option.name != "LoRA" and option.meets - {Place.HEAD}]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in pairs(ON_ONE_PROCESS)]


@pytest.mark.parametrize("case", [*alone(QUICK), *SLOW], ids=str)
def test_options_keep_the_numbers_alone_and_together(case: Case, engines: Engines) -> None:
    assert_exact(case, engines)


def test_compiled_entropy_keeps_the_numbers(engines: Engines) -> None:
    """Inductor takes a minute, for the slow pairs; compiled layers have tests/engine/test_compiled_layers.py."""
    with graphs_as_they_are():
        assert_exact(case_of("compiled entropy"), Engines(engines.checkpoint))


@pytest.mark.parametrize("case", pairs(ON_ONE_PROCESS, refused=True), ids=str)
def test_two_options_that_exclude_each_other_are_refused(case: Case, engines: Engines) -> None:
    with pytest.raises(ValueError, match=r"use_fused_kernels=True.*use_fused_kernels=False"):
        run_engine(engines.of(case), batch_of(case), loss_of(case))


def test_another_attention_implementation_is_replaced_too(engines: Engines) -> None:
    model = {"override_config": {"attn_implementation": "flex_attention"}}
    batch, loss = batch_of(DEFAULT), loss_of(DEFAULT)
    assert_same(run_engine(engines.of(DEFAULT, model=model), batch, loss), engines.reference_of(DEFAULT, batch))


@pytest.mark.parametrize("case", covering(pairs(OF_CRITICS)), ids=str)
def test_options_that_are_not_about_the_head_keep_values_of_critics(case: Case, value_model: str) -> None:
    of_case = {section: case.settings(section) for section in ("engine", "model")}
    engine = make_engine(value_model, critic=True, splits=case.splits, **of_case)
    check_exact(engine, value_model, batch_of(case, make=critic_batch))


PAGE = (Path(__file__).parents[2] / "docs/support.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
ROW = re.compile(r"^\| ([^|]+) \| `?([^|]+?)`? \|", re.MULTILINE)
ROWS = [(*row, title) for title in ("Exact", "Rejected") for row in ROW.findall(SECTIONS[title])]


def test_the_page_has_a_row_for_every_option_that_is_tested() -> None:
    names = [option.name for option in OPTIONS]
    assert len(set(names)) == len(names)
    assert {(option.name, option.override, "Exact") for option in OPTIONS} <= set(ROWS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize(("override", "status"), [row[1:] for row in ROWS if "=" in row[1]])
def test_override_is_taken_or_refused_before_anything_starts(override: str, status: str, path: Path) -> None:
    flags = f"critic.model.path={path}", "actor_rollout_ref.actor.use_prefix_grouper=True", "trainer.n_gpus_per_node=4"
    config = compose_config(*runnable(path), *flags, *split(override))
    found = [issue.why for issue in sharing_issues(config) if not issue.is_warning]
    # What is said of this machine or of this model is no fault of the override.
    found = [why for why in found if not re.search("needs a GPU|the package veomni|but with qwen3_moe", why)]
    assert bool(found) == (status == "Rejected"), found
