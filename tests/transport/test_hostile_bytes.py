"""Both ends of the codec among damaged streams; the same at length is `wide`."""

from __future__ import annotations

import pytest
from hostile_bytes import run


def test_a_sample_of_damaged_streams():
    assert run(3_000, seed=13) > 6_000


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(2))
def test_a_million_damaged_streams(seed):
    assert run(260_000, seed) > 520_000
