"""The table itself: no row without a test, no test that is not there, and overrides that verl takes."""

import copy
from pathlib import Path

import pytest
import transformers
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

from tests.config.config_support import TINY, compose_config, save_checkpoint
from tests.options.option import Option, parse
from tests.options.table import OPTIONS
from verl_pg_plugin.config.preflight import sharing_issues

REPOSITORY = Path(__file__).parents[2]
NAMES = [option.name for option in OPTIONS]


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_every_option_is_proven() -> None:
    for option in OPTIONS:
        assert option.meets or option.proofs, option.name
        assert option.refuses <= set(NAMES)
        for proof in option.proofs:
            path, _, test = proof.partition("::")
            assert (REPOSITORY / path).is_file(), proof
            assert f"def {test.partition('[')[0]}" in (REPOSITORY / path).read_text(), proof


@pytest.fixture(scope="module")
def runnable(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    """A config that leaves nothing to object to."""
    hf_config = transformers.Qwen3Config(**{**TINY, "num_attention_heads": 4})
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("qwen3"), hf_config)
    return compose_config(
        f"actor_rollout_ref.model.path={checkpoint}",
        f"critic.model.path={checkpoint}",
        "actor_rollout_ref.actor.use_prefix_grouper=True",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.name=hf",
        "algorithm.adv_estimator=grpo",
    )


def with_override(config: DictConfig, override: str) -> DictConfig:
    """Hydra's own way to change a config, which takes a second less than to compose it."""
    if override.startswith("model_engine="):  # picks files, and no value
        model = f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}"
        return compose_config(model, "actor_rollout_ref.actor.use_prefix_grouper=True", override)
    changed = copy.deepcopy(config)
    ConfigLoaderImpl._apply_overrides_to_config(parse(override), changed)
    return changed


@pytest.mark.parametrize("option", [o for o in OPTIONS if "=" in o.override], ids=lambda option: option.name)
def test_override_is_taken_or_refused_before_anything_starts(option: Option, runnable: DictConfig) -> None:
    config = with_override(runnable, option.override)
    found = [issue.why for issue in sharing_issues(config) if not issue.is_warning]
    if option.needs_gpu:  # the machine's fault
        found = [why for why in found if "needs a GPU" not in why]
    assert bool(found) == option.rejected, found
