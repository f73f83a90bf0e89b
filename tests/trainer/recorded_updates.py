"""Loaded by every process of a run (``VERL_USE_EXTERNAL_MODULES``): what the trainer sends to each update, in a file.

``RECORD_DIR`` names the folder; a step's file is ``torch.save`` of the rows and the metrics of the update.
"""

import os
from pathlib import Path
from typing import Any

from verl_pg_plugin.after_import import after_import

FIELDS = ("prompts", "responses", "response_mask", "rm_scores", "old_log_probs", "advantages")


def _plant() -> None:
    import torch
    import transfer_queue
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    update = PPOTrainer._update_actor

    def recording(self: PPOTrainer, batch: Any, metrics: dict[str, Any]) -> Any:
        fields = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS)
        )
        columns = [[row.clone() for row in fields[name].unbind()] for name in FIELDS]
        rows = [
            {"key": key, "filler": bool(tag.get("is_padding")), **dict(zip(FIELDS, row, strict=True))}
            for key, tag, *row in zip(batch.keys, batch.tags, *columns, strict=True)
        ]
        batch = update(self, batch, metrics)
        torch.save((rows, dict(metrics)), Path(os.environ["RECORD_DIR"], f"step-{self.global_steps}.pt"))
        return batch

    PPOTrainer._update_actor = recording


after_import("verl.trainer.ppo.v1.trainer_base", _plant)
