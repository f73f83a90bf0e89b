"""Every option alone, and every two of the same code, match single sequences.

The quick tests run pairs in tests/options/test_ranks.py, many in one case; the slow ones here run each pair alone.
"""

import re
from pathlib import Path

import pytest

from tests.config.config_support import compose_config, runnable, save_checkpoint
from tests.engine.ranks import uncompiled_graphs
from tests.options.harness import Engines, assert_exact, batch_of, loss_of
from tests.options.option import Case, Place, alone, covering, pairs, split
from tests.options.table import DEFAULT, OPTIONS, case_of
from tests.support import assert_same, check_exact, critic_batch, make_engine, run_engine
from verl_pg_plugin.config.preflight import sharing_issues

ON_ONE_PROCESS = [option for option in OPTIONS if option.num_ranks == 1 and not option.needs_gpu]
QUICK = [option for option in ON_ONE_PROCESS if not option.compiles]
# verl configures LoRA for causal LMs, which fails on a token classifier.
OF_CRITICS = [option for option in QUICK if option.name != "LoRA" and option.meets - {Place.HEAD}]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in pairs(ON_ONE_PROCESS)]


@pytest.mark.parametrize("case", [*alone(QUICK), *SLOW], ids=str)
def test_options_are_exact_alone_and_together(case: Case, engines: Engines) -> None:
    assert_exact(case, engines)


def test_compiled_entropy_is_exact(engines: Engines) -> None:
    """The slow pairs use Inductor; tests/engine/test_compiled_layers.py has compiled layers."""
    with uncompiled_graphs():
        assert_exact(case_of("compiled entropy"), Engines(engines.checkpoint))


@pytest.mark.parametrize("case", pairs(ON_ONE_PROCESS, refused=True), ids=str)
def test_incompatible_options_are_refused(case: Case, engines: Engines) -> None:
    with pytest.raises(ValueError, match=r"use_fused_kernels=True.*use_fused_kernels=False"):
        run_engine(engines.of(case), batch_of(case), loss_of(case))


def test_another_attention_implementation_is_replaced(engines: Engines) -> None:
    model = {"override_config": {"attn_implementation": "flex_attention"}}
    batch, loss = batch_of(DEFAULT), loss_of(DEFAULT)
    assert_same(run_engine(engines.of(DEFAULT, model=model), batch, loss), engines.reference_of(DEFAULT, batch))


@pytest.mark.parametrize("case", covering(pairs(OF_CRITICS)), ids=str)
def test_critics_are_exact_with_options(case: Case, value_model: str) -> None:
    of_case = {section: case.settings(section) for section in ("engine", "model")}
    engine = make_engine(value_model, critic=True, splits=case.splits, **of_case)
    check_exact(engine, value_model, batch_of(case, make=critic_batch))


PAGE = (Path(__file__).parents[2] / "docs/support.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
ROW = re.compile(r"^\| ([^|]+) \| `?([^|]+?)`? \|", re.MULTILINE)
ROWS = [(*row, title) for title in ("Exact", "Rejected") for row in ROW.findall(SECTIONS[title])]


def test_the_page_lists_every_tested_option() -> None:
    names = [option.name for option in OPTIONS]
    assert len(set(names)) == len(names)
    assert {(option.name, option.override, "Exact") for option in OPTIONS} <= set(ROWS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize(("override", "status"), [row[1:] for row in ROWS if "=" in row[1]])
def test_overrides_are_accepted_or_refused_by_the_preflight(override: str, status: str, path: Path) -> None:
    flags = f"critic.model.path={path}", "actor_rollout_ref.actor.use_prefix_grouper=True", "trainer.n_gpus_per_node=4"
    config = compose_config(*runnable(path), *flags, *split(override))
    issues = [issue.why for issue in sharing_issues(config) if not issue.is_warning]
    # Issues of this machine and of this model do not depend on the override.
    issues = [why for why in issues if not re.search("needs a GPU|the package veomni|except with qwen3_moe", why)]
    assert bool(issues) == (status == "Rejected"), issues
