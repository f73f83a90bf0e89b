"""How much a run would share, as far as its overrides tell: rows of a group, and whether a micro-batch holds one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from transformers import PretrainedConfig
from verl.trainer.ppo.utils import need_reference_policy

from verl_pg_plugin.architectures import architecture_issues, head_obstacle, text_skeleton
from verl_pg_plugin.cli.doctor.report import Problem, Section
from verl_pg_plugin.config.checkpoints import read_hf_config
from verl_pg_plugin.config.keys import ACTOR, REF, ROLLOUT, USE_PREFIX_GROUPER, USE_REMOVE_PADDING
from verl_pg_plugin.config.mode import Mode, mode_of
from verl_pg_plugin.config.rules import sp_size_of
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.mixers import MIXERS, count_layers

__all__ = ["Group", "Limit", "flop_bound", "sharing", "sharing_model"]

GROUP = ("data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.n")
LOGITS_CHUNK_SIZE = "prefix_grouper.logits_chunk_size"
CARRY = "prefix_grouper.carry"
SP_SIZES = tuple(
    f"{section}ulysses_sequence_parallel_size"
    for role in (ACTOR, REF)
    for section in (f"{role}.", f"{role}.fsdp_config.")
)
# What the update, the reference log-probs and the old log-probs call their limits, and whose engine computes them.
ROLES = ((ACTOR, "ppo_", "", ACTOR), (REF, "log_prob_", "log_prob_", REF), (ROLLOUT, "log_prob_", "log_prob_", ACTOR))


@dataclass(frozen=True)
class Group:
    """A prompt and its responses, all of the greatest length; see ``layout.PackedLayout`` for what a row is.

    Attributes:
        prompt, response: tokens.
        n: responses.
    """

    prompt: int
    response: int
    n: int

    @property
    def num_rows(self) -> int:
        """Rows with the prompt computed once; the last token of a sequence has none."""
        return self.prompt - 1 + self.n * self.response

    @property
    def num_alone(self) -> int:
        """Tokens that stock verl computes."""
        return self.n * (self.prompt + self.response)


@dataclass(frozen=True)
class Limit:
    """What a micro-batch may hold: ``value`` rows per GPU, ``sp_size`` GPUs sharing one, or ``value`` sequences."""

    key: str
    value: int
    counts_rows: bool
    sp_size: int = 1

    def parts(self, group: Group) -> int:
        """Micro-batches that a group is cut into; 0 if not even one sequence fits."""
        fit = (self.value * self.sp_size - (group.prompt - 1)) // group.response if self.counts_rows else self.value
        return 0 if fit < 1 else -(-group.n // fit)

    def fix(self, group: Group) -> str:
        """Override under which the group stays whole."""
        return f"{self.key}={-(-group.num_rows // self.sp_size) if self.counts_rows else group.n}"

    def __str__(self) -> str:
        unit = "tokens per GPU" if self.counts_rows else "sequences"
        return f"{self.value} {unit}" + (f", shared by {self.sp_size} GPUs" if self.sp_size > 1 else "")


def sharing(config: DictConfig) -> Section:
    """Estimate for the longest prompt and responses that the overrides allow."""
    counts = {key: OmegaConf.select(config, key) for key in (*GROUP, *SP_SIZES)}
    limits = _limits(config) if _are_counts(counts.values()) else []
    if not _are_counts(limit.value for limit in limits) or not limits or any(counts[key] is None for key in GROUP):
        return Section("Sharing", (("estimate", f"needs {', '.join(GROUP)}, and budgets that are counts"),))
    group = Group(*(counts[key] for key in GROUP))
    rows = [
        ("longest group", f"{group.n} responses of {group.response} tokens to a prompt of {group.prompt}"),
        ("its tokens", f"{group.num_rows} instead of {group.num_alone}, {group.num_alone / group.num_rows:.2f}x fewer"),
    ]
    hf_config = sharing_model(config)
    bound = flop_bound(hf_config, group) if hf_config else None
    rows.append(
        (
            "its FLOPs",
            f"{bound:.2f}x fewer" if bound else "known with a local checkpoint of transformers' own",
        )
    )
    if mode_of(config) is not Mode.PACKED:
        rows.append(("in force", f"only with {USE_PREFIX_GROUPER}=True {USE_REMOVE_PADDING}=True (packed mode)"))
        return Section("Sharing", tuple(rows))
    rows += [(limit.key, f"{limit}: holds {_holds(limit.parts(group))}") for limit in limits]
    cannot = mixers_that_do_not_carry(hf_config) if hf_config else []
    carries = OmegaConf.select(config, CARRY, default="auto") != "never" and not cannot
    if any(limit.parts(group) > 1 for limit in limits):
        what = (
            "where that is cheaper and fits, its parts hand on what they share"
            if carries
            else "each part computes the prompt"
        )
        rows.append((CARRY, f"{what}: {', '.join(cannot)} layers hand nothing on" if cannot else what))
    head = text_skeleton(hf_config) if hf_config and OmegaConf.select(config, LOGITS_CHUNK_SIZE) else None
    if head is not None and (why := head_obstacle(head)):
        rows.append((LOGITS_CHUNK_SIZE, f"not in force: logits of all response rows are held at once ({why})"))
    return Section("Sharing", tuple(rows), tuple(_problems(group, limits, carries, cannot)))


def mixers_that_do_not_carry(hf_config: PretrainedConfig) -> list[str]:
    """Names of the mixers that keep parts of a group from handing on what they share."""
    return [name for name in count_layers(hf_config.get_text_config()) if not MIXERS[name].carries]


def sharing_model(config: DictConfig) -> PretrainedConfig | None:
    """Config of the actor's checkpoint, overrides applied.

    None without a local checkpoint of one of transformers' own architectures that can share prefixes.
    """
    hf_config = read_hf_config(config)
    return None if hf_config is None or architecture_issues(hf_config, trust_remote_code=False) else hf_config


def flop_bound(hf_config: PretrainedConfig, group: Group) -> float:
    """FLOPs of stock verl, every sequence alone and the head on all tokens, over those of shared rows."""
    flops = ModelFlops.of_config(hf_config)
    prefix, responses = group.prompt - 1, np.full(group.n, group.response)
    start = np.array([0, *[prefix] * group.n])
    shared = flops.segments(start, np.array([prefix, *responses]), np.array([0, *responses]))
    return float(flops.alone(responses + group.prompt).sum() / shared.sum())


def _limits(config: DictConfig) -> list[Limit]:
    limits = []
    for role, kind, switch, engine in ROLES:
        if role == REF and not need_reference_policy(config):
            continue
        counts_rows = bool(OmegaConf.select(config, f"{role}.{switch}use_dynamic_bsz"))
        key = f"{role}.{kind}{'max_token_len_per_gpu' if counts_rows else 'micro_batch_size_per_gpu'}"
        value = OmegaConf.select(config, key)
        sp_size = sp_size_of(config, engine) if counts_rows else 1
        if value is not None:
            limits.append(Limit(key, value, counts_rows, sp_size))
    return limits


def _are_counts(values: Iterable[Any]) -> bool:
    """Whether each is left out or a positive integer; Hydra takes any value, and those that are none are refused."""
    return all(value is None or (type(value) is int and value > 0) for value in values)


def _holds(parts: int) -> str:
    return {0: "not even one sequence", 1: "a whole group"}.get(parts, f"a part of a group, cut in {parts}")


def _problems(group: Group, limits: list[Limit], carries: bool, cannot: list[str]) -> list[Problem]:
    """One for the limits that cut a group whose parts hand nothing on; those that fit no sequence are refused."""
    problems = []
    cutting = [limit for limit in limits if limit.parts(group) > 1]
    if cutting and not carries:
        parts = max(limit.parts(group) for limit in cutting)
        what = (
            f"the longest group, {group.num_rows} rows of {group.n} sequences, is cut in up to {parts} parts that each "
            f"compute the prompt again: {_settings(cutting)}"
        )
        problems.append(Problem(what, _fixes(cutting, group) if cannot else f"++{CARRY}=auto", is_warning=True))
    return problems


def _settings(limits: list[Limit]) -> str:
    return ", ".join(f"{limit.key}={limit.value}" for limit in limits)


def _fixes(limits: list[Limit], group: Group) -> str:
    return " ".join(limit.fix(group) for limit in limits)
