"""verl's data set without image preprocessing, for ``data.custom_cls``.

verl's own resizes images with qwen-vl-utils, which needs torchvision. Generated images have the right size.
"""

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset


class ImageDataset(RLHFDataset):
    """Samples whose images are PIL images of whole patches."""

    @classmethod
    def _process_multi_modal_info(
        cls, messages: list[dict[str, Any]], image_patch_size: int, config: Any
    ) -> tuple[list[Any] | None, None, None]:
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        images = [part["image"].convert("RGB") for part in parts if part["type"] == "image"]
        return images or None, None, None
