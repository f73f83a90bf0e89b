"""Loaded by every process of a run (``VERL_USE_EXTERNAL_MODULES``): what the trainer sends to each update, in a file.

``RECORD_DIR`` names the folder; a step's file is ``torch.save`` of keys, tags, rows and the metrics of the update.
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
        rows = {name: [row.clone() for row in fields[name].unbind()] for name in FIELDS}
        record = {"keys": list(batch.keys), "tags": list(batch.tags), "rows": rows}
        batch = update(self, batch, metrics)
        folder = Path(os.environ["RECORD_DIR"])
        torch.save(record | {"metrics": dict(metrics)}, folder / f"step-{self.global_steps}.pt")
        return batch

    PPOTrainer._update_actor = recording


after_import("verl.trainer.ppo.v1.trainer_base", _plant)
