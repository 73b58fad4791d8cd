"""Memory for weights: zeros at cache lines, apart from each other, given back when the array dies."""

from __future__ import annotations

import ctypes
import errno
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hepti_mqtt.kernels import pages
from hepti_mqtt.kernels.pages import aligned_zeros


@settings(deadline=None)
@given(shape=st.lists(st.integers(0, 90), min_size=1, max_size=3), dtype=st.sampled_from(["f4", "f2", "i1"]))
def test_any_shape_is_zero_and_begins_at_a_cache_line(shape, dtype):
    array = aligned_zeros(tuple(shape), dtype)
    assert array.shape == tuple(shape)
    assert array.dtype == dtype
    assert array.ctypes.data % 64 == 0 or not array.size
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert not array.any()
    array[...] = 1


@pytest.mark.parametrize("nbytes", [1000, 70_000, 3 << 20])
def test_arrays_of_many_threads_do_not_overlap(nbytes):
    count = max(2, min(40, (200 << 20) // nbytes))
    with ThreadPoolExecutor(4) as pool:
        arrays = list(pool.map(lambda _: aligned_zeros((nbytes,), "i1"), range(count)))
    for value, array in enumerate(arrays):
        array[:] = value + 1
    for value, array in enumerate(arrays):
        assert (array == value + 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes pages out of a mapping")
def test_a_dead_array_gives_its_pages_back_and_its_neighbours_stay():
    arrays = [aligned_zeros((1 << 20,), "i1") for _ in range(9)]
    for array in arrays:
        array[:] = 7
    view, address = arrays[0][5:10], arrays[4].ctypes.data
    del array, arrays[::2]
    # A page that was given back is zero when it is read again.
    assert not any((ctypes.c_char * (1 << 20)).from_address(address).raw)
    assert (view == 7).all()
    assert all((a == 7).all() for a in arrays)


def test_where_no_more_can_be_mapped_the_heap_has_it_or_says_that_it_has_not(monkeypatch):
    def full(nbytes):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pages, "_Mapping", full)
    monkeypatch.setattr(pages, "_open", None)
    array = aligned_zeros((300, 1000), "f4")
    assert array.shape == (300, 1000)
    assert array.ctypes.data % 64 == 0
    assert not array.any()
    with pytest.raises(MemoryError):
        aligned_zeros((1 << 60,), "f4")
