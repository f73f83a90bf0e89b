"""A loss that fails on one rank ends the step on every rank, and not in a collective that the others wait in.

A loss that runs collectives of its own is not covered: where it fails on one rank, the others wait in those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Loss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


class LossGuard:
    """Keeps the first error of a mini-batch's loss until all of its forwards and backwards have run.

    The layers of a sharded model gather weights and reduce gradients in every forward and backward. A rank that stopped
    at its loss would leave the others waiting for it, so it goes on with a loss of zero, whose gradient nobody uses.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    def around(self, loss_function: Loss | None) -> Loss | None:
        """``loss_function`` as verl calls it, without its errors; None stays None."""
        if loss_function is None:
            return None

        def guarded(model_output: dict[str, torch.Tensor], **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            if self._error is None:
                try:
                    return loss_function(model_output=model_output, **kwargs)
                except Exception as error:  # raised by ``raise_kept``, once every rank is through
                    self._error = error
            return _zero(model_output), {}

        return guarded

    def raise_kept(self) -> None:
        """Raise what the loss raised; to be run ``on_every_rank``, since only this one knows of it."""
        if self._error is not None:
            raise self._error


def _zero(model_output: dict[str, torch.Tensor]) -> torch.Tensor:
    """Zero that depends on every output, so that its backward visits every layer."""
    values = [output.values() if output.is_nested else output for output in model_output.values()]
    return sum(0.0 * value.float().sum() for value in values if value.is_floating_point())
