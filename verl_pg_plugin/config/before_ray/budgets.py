"""Does every token budget hold the longest sequence that the data section allows?"""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_reference_policy

from verl_pg_plugin.config.before_ray.reading import count, without_followers, wrong
from verl_pg_plugin.config.facts import Facts, Role, runs_critic
from verl_pg_plugin.config.keys import ACTOR, CRITIC, REF, ROLLOUT
from verl_pg_plugin.config.mode import Mode, mode_of
from verl_pg_plugin.config.violation import Violation

__all__ = ["Budget", "budget_violations", "budgets_of"]

PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"
MAX_MODEL_LEN = f"{ROLLOUT}.max_model_len"

Budget = tuple[str, Role]
"""Key of tokens per GPU, and the role whose engine computes them."""


def budgets_of(config: DictConfig) -> Iterator[Budget]:
    """Budgets in force: those of roles that the run has and that cut by tokens."""
    if OmegaConf.select(config, f"{ACTOR}.use_dynamic_bsz"):
        yield f"{ACTOR}.ppo_max_token_len_per_gpu", Role.ACTOR
    if OmegaConf.select(config, f"{ROLLOUT}.log_prob_use_dynamic_bsz"):
        yield f"{ROLLOUT}.log_prob_max_token_len_per_gpu", Role.ACTOR
    if need_reference_policy(config) and OmegaConf.select(config, f"{REF}.log_prob_use_dynamic_bsz"):
        yield f"{REF}.log_prob_max_token_len_per_gpu", Role.REF
    if runs_critic(config) and OmegaConf.select(config, "trainer.use_v1"):
        yield f"{CRITIC}.ppo_infer_max_token_len_per_gpu", Role.CRITIC  # of the update, too


def budget_violations(config: DictConfig) -> list[Violation]:
    """Budgets smaller than one prompt with one response."""
    return without_followers(_too_small(config))


def _too_small(config: DictConfig) -> Iterator[Violation]:
    prompt, response = count(config, PROMPT), count(config, RESPONSE)
    if prompt is None or response is None:
        return
    # The last token of a sequence has no row in packed mode: nothing is predicted from it.
    within = count(config, MAX_MODEL_LEN) or prompt + response  # the rollout writes no longer ones
    longest = min(prompt + response, within) - (mode_of(config) is Mode.PACKED)
    for key, role in budgets_of(config):
        budget, sp_size = count(config, key), Facts.from_hydra(config, role).value("sp_size") or 1
        if budget is None or not isinstance(sp_size, int) or sp_size < 1 or budget * sp_size >= longest:
            continue
        why = f"the longest sequence, {PROMPT}={prompt} and {RESPONSE}={response}, needs {longest} tokens"
        if sp_size > 1:
            why += f"; {sp_size} GPUs share one, and together they hold {budget * sp_size}"
        yield wrong(config, "budget", key, why, f"{key}={-(-longest // sp_size)}")
