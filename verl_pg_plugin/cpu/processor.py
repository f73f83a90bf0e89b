"""Qwen3-VL's processor for images alone, which needs no torchvision.

transformers' own has a part for videos, and that part is computed by torchvision. The CPU default trains on generated
images, so its checkpoint names no processor class, and ``AutoProcessor`` finds this one by the type of the config.
Checkpoints from elsewhere name theirs and get it.
"""

from __future__ import annotations

from typing import Any

import transformers

__all__ = ["Qwen3VLProcessor", "register_processor"]


class Qwen3VLProcessor(transformers.Qwen3VLProcessor):
    """Images and text; of the same name, by which verl tells processors apart."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        # What a processor consists of, transformers reads off the parameters of this method.
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def register_processor() -> None:
    """Let ``AutoProcessor`` find it for checkpoints of Qwen3-VL that name no processor class."""
    transformers.AutoProcessor.register(transformers.Qwen3VLConfig, Qwen3VLProcessor, exist_ok=True)
