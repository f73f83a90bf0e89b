"""A worker group of four processes that are two data-parallel ranks."""

from typing import Any


class Workers:
    def __init__(self) -> None:
        self._dispatch_info: dict[str, list[int]] = {}
        self.updated: list[Any] = []

    def _query_dispatch_info(self, role: str) -> list[int]:
        assert role == "actor"
        return [0, 0, 1, 1]
