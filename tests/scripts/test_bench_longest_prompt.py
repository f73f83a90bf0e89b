"""The search for the longest prompt ends at the right one, whatever fits."""

from types import SimpleNamespace

import pytest
from bench_longest_prompt import bisect


@pytest.mark.parametrize("longest", [0, 16384, 20000, 65536, 90000, 163840, 10**6])
def test_the_longest_prompt_that_fits_is_found_to_within_the_tokens_asked(longest: int) -> None:
    rows = list(bisect(lambda p: SimpleNamespace(prompt=p, fits=p <= longest), 16384, 163840, within=4096))
    fitting = [row.prompt for row in rows if row.fits]
    if longest < 16384:
        assert not fitting
    else:
        assert max(fitting) <= longest
        assert min(longest, 163840) - max(fitting) <= 4096
    assert len(rows) <= 2 + 6
