"""The three V1 trainers of verl, each with the group-keeping balance.

verl's registry holds one class per name, so ours carry a prefix; once chosen, they run under the plain name.
"""

from typing import Any

import numpy as np
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_pg_plugin.batching.balance import balance_groups
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.trainer.console import console
from verl_pg_plugin.trainer.modes import PREFIX


class GroupBalanceMixin:
    """Replaces the order that verl's balance gives to a batch; everything else about the trainer is verl's.

    Attributes:
        model_flops: of the actor, by which groups are balanced.
    """

    config: Any
    actor_rollout_wg: Any
    model_flops: ModelFlops

    def __init__(self, config: Any) -> None:
        # verl compares the mode with "sync" to choose the replay buffer and how checkpoints are taken.
        config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(PREFIX)
        super().__init__(config)  # type: ignore[call-arg]

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, with a line for each step on the console and the gain at the end; see ``prefix_grouper.console``."""
        with console(self.config, getattr(self, "total_training_steps", None)):
            super().fit(agent_loop_manager)  # type: ignore[misc]

    def _init_tokenizer(self) -> None:
        """Price the actor too, from its config: before any worker starts, so what cannot be priced fails at once.

        Just now verl's own method loaded the same config in this process, from a folder, the hub or hdfs and with the
        user's ``trust_remote_code``, to get at the tokenizer: there is no checkpoint that trains and has none here.
        """
        super()._init_tokenizer()  # type: ignore[misc]
        section = OmegaConf.to_container(self.config.actor_rollout_ref.model, resolve=True)
        model = omega_conf_to_dataclass(OmegaConf.create({**section, "load_tokenizer": False}))  # type: ignore[dict-item]
        self.model_flops = ModelFlops.of_config(model.hf_config, trust_remote_code=model.trust_remote_code)

    def _balance_batch(
        self, batch: Any, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        """verl pads the batch to a multiple it can dispatch and tears groups apart; put them together again.

        Sequences of one prompt are those with one uid, the part of a key before ``_{session}_{index}``.
        """
        batch = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)  # type: ignore[misc]
        actor = self.config.actor_rollout_ref.actor
        mini_batch_size = actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        num_ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        uids = [key.rsplit("_", 2)[0] for key in batch.keys]
        balance = balance_groups(
            group=np.unique(uids, return_inverse=True)[1],
            prompt_lengths=np.array([tag["prompt_len"] for tag in batch.tags]),
            response_lengths=np.array([tag["response_len"] for tag in batch.tags]),
            price=self.model_flops.segments,
            num_ranks=num_ranks,
            # While only the critic trains, the batch is a multiple of its mini-batches and not of the actor's.
            num_mini_batches=1 if len(uids) % mini_batch_size else len(uids) // mini_batch_size,
        )
        lengths = [tag["seq_len"] for tag in batch.tags]
        batch.reorder(balance.order.tolist())
        partitions = [part.tolist() for part in np.split(balance.order, num_ranks)]
        metrics.update(log_seqlen_unbalance(seqlen_list=lengths, partitions=partitions, prefix=logging_prefix))
        metrics["prefix_grouper/balance/slowest_over_mean"] = balance.slowest_over_mean
        metrics["prefix_grouper/balance/cut_groups"] = balance.num_cut_groups
        return batch


@register_trainer("pg_sync")
class GroupSyncTrainer(GroupBalanceMixin, PPOTrainerSync):
    """``trainer_mode=sync``."""


@register_trainer("pg_colocate_async")
class GroupColocateAsyncTrainer(GroupBalanceMixin, PPOTrainerColocateAsync):
    """``trainer_mode=colocate_async``."""


@register_trainer("pg_separate_async")
class GroupSeparateAsyncTrainer(GroupBalanceMixin, PPOTrainerSeparateAsync):
    """``trainer_mode=separate_async``."""
