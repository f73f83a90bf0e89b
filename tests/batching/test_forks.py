"""The places where neighbours share least, found without looking at every neighbour."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_pg_plugin.batching.forks import Forks


@given(st.data(), st.lists(st.integers(0, 4), min_size=2, max_size=40))
def test_every_range_is_cut_at_its_least_shared_places_and_nearest_to_its_middle(
    data: st.DataObject, shared: list[int]
) -> None:
    first = data.draw(st.integers(0, len(shared) - 2))
    stop = data.draw(st.integers(first + 2, len(shared)))
    inside = range(first + 1, stop)
    least = [k for k in inside if shared[k] == min(shared[first + 1 : stop])]
    forks = Forks(np.array(shared))
    assert forks.of(first, stop) == least
    assert forks.middle(first, stop) == min(least, key=lambda k: (abs(2 * k - first - stop), k))
