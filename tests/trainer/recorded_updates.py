"""Record the sequences and metrics of each update in ``RECORD_DIR``; loaded through ``VERL_USE_EXTERNAL_MODULES``."""

import os
from pathlib import Path
from typing import Any

from verl_pg_plugin.after_import import after_import

FIELDS = ("prompts", "responses", "response_mask", "rm_scores", "old_log_probs", "advantages")


def _patch_update() -> None:
    import torch
    import transfer_queue
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    update = PPOTrainer._update_actor

    def recording(self: PPOTrainer, batch: Any, metrics: dict[str, Any]) -> Any:
        fields = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS)
        )
        columns = [[values.clone() for values in fields[name].unbind()] for name in FIELDS]
        sequences = [
            {"filler": bool(tag.get("is_padding")), **dict(zip(FIELDS, values, strict=True))}
            for tag, *values in zip(batch.tags, *columns, strict=True)
        ]
        batch = update(self, batch, metrics)
        torch.save((sequences, dict(metrics)), Path(os.environ["RECORD_DIR"], f"step-{self.global_steps}.pt"))
        return batch

    PPOTrainer._update_actor = recording


after_import("verl.trainer.ppo.v1.trainer_base", _patch_update)
