"""Bins that fill up: which of those with room enough has least in it."""

import heapq


class LeastLoaded:
    """Bins by the room they have left, each room a heap by load: the least loaded that fits is the best of few tops.

    Bins are numbers; of equal loads the lowest number is taken. A bin that was taken is gone until it is put back.
    """

    def __init__(self) -> None:
        self._by_room: dict[int, list[tuple[float, int]]] = {}

    def put(self, chosen: int, room: int, load: float) -> None:
        heapq.heappush(self._by_room.setdefault(room, []), (load, chosen))

    def take(self, needed: int) -> int | None:
        """The least loaded bin with room for ``needed``; None where there is none."""
        fitting = [(heap[0], room) for room, heap in self._by_room.items() if room >= needed]
        return self._pop(min(fitting)[1]) if fitting else None

    def take_roomiest(self) -> int:
        """The bin with most room, of several the least loaded."""
        return self._pop(max(self._by_room))

    def _pop(self, room: int) -> int:
        heap = self._by_room[room]
        _, chosen = heapq.heappop(heap)
        if not heap:
            del self._by_room[room]
        return chosen
