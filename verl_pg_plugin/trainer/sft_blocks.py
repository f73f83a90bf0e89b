"""Put samples with a common prefix into one batch; for ``data.custom_cls`` of verl's SFT trainer."""

import logging
from typing import Any

from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

logger = logging.getLogger(__name__)


class SFTBlocks:
    """verl's SFT samples sorted by text; an item is a block of ``data.samples_per_block`` neighbours."""

    def __init__(self, *, config: Any, **arguments: Any) -> None:
        self.samples, self.size = MultiTurnSFTDataset(config=config, **arguments), config.samples_per_block
        tools = self.samples.tools or [None] * len(self.samples)
        texts = [str(sample) for sample in zip(tools, self.samples.messages, strict=True)]
        self.order = sorted(range(len(texts)), key=texts.__getitem__)
        if len(texts) % self.size:
            logger.warning("%d samples fill no block of %d and are left out", len(texts) % self.size, self.size)

    def __len__(self) -> int:
        return len(self.order) // self.size

    def __getitems__(self, blocks: list[int]) -> list[dict[str, Any]]:  # torch's data loader reads a batch at once
        return [self.samples[i] for block in blocks for i in self.order[block * self.size :][: self.size]]
