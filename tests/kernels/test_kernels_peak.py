from __future__ import annotations

import numpy as np
import pytest
from kernels_support import pool

from hepti_mqtt.kernels import peak
from hepti_mqtt.kernels.cpu import TILE
from hepti_mqtt.kernels.jit import JIT, compile_all


@pytest.mark.skipif(not JIT, reason="only compiled code reads")
@pytest.mark.parametrize("streams", peak._STREAMS)
def test_every_element_is_read_once(streams):
    compile_all()
    array = np.arange(64 * TILE.lanes, dtype=np.float32)
    out = np.empty(TILE.lanes, np.float32)
    peak._read(out, array, streams)
    np.testing.assert_array_equal(out, array.reshape(-1, TILE.lanes).sum(axis=0))


@pytest.mark.skipif(not JIT, reason="only compiled code multiplies")
def test_every_multiply_add_is_done():
    compile_all()
    out, factor = np.zeros((2, peak._LINE), np.float32), np.full(TILE.lanes, 0.5, np.float32)
    peak._multiply_adds(out, factor, 2, 1)
    starts = 0.5 + np.arange(peak._CHAINS)
    np.testing.assert_allclose(out[1, : TILE.lanes], ((starts * 0.5 + 0.5) * 0.5 + 0.5).sum())
    assert not out[0].any()


def test_the_roofs_say_how_much_they_do():
    reads = peak.reads_of_memory(1 << 16, repeats=1)
    for threads in (1, 2):
        with pool(threads) as workers:
            adds = peak.multiply_adds(workers)
            adds.run()
            assert adds.amount >= 2 * 1000 * TILE.lanes * threads
    reads.run()
    assert reads.amount == 1 << 16


def test_an_array_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="larger than the last-level cache"):
        peak.reads_of_memory(16)
