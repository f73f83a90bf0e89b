"""Of the bins with room enough the least loaded, whatever was put and taken before."""

from hypothesis import given
from hypothesis import strategies as st
from verl_pg_plugin.batching.least_loaded import LeastLoaded

steps = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 6)), max_size=30)


@given(steps)
def test_takes_what_a_look_at_every_bin_would(steps: list[tuple[int, int, int]]) -> None:
    bins, there = LeastLoaded(), {}
    for number, (room, load, needed) in enumerate(steps):
        bins.put(number, room, load)
        there[number] = (load, room)
        fitting = [(load, chosen) for chosen, (load, room) in there.items() if room >= needed]
        assert bins.take(needed) == (min(fitting)[1] if fitting else None)
        if fitting:
            del there[min(fitting)[1]]
    while there:
        most = max(room for _, room in there.values())
        chosen = min((load, chosen) for chosen, (load, room) in there.items() if room == most)[1]
        assert bins.take_roomiest() == chosen
        del there[chosen]
