"""What Numba made of the inner loops on this machine: the tiles as they were written, and the kernels' own products."""

from __future__ import annotations

import functools
import re

import pytest
from assembly import compiled, loops

from hepti_mqtt.kernels import TILING
from hepti_mqtt.kernels.attention import tiles
from hepti_mqtt.kernels.conv import conv2d
from hepti_mqtt.kernels.gemm import few, int8, linear, narrow
from hepti_mqtt.kernels.gemm.forms import HALF_IN_HARDWARE
from hepti_mqtt.kernels.machine import jit
from hepti_mqtt.kernels.machine.isa import DOT, TILE, isa

pytestmark = pytest.mark.skipif(not jit.JIT, reason="about compiled code")

# Kinds of tiles by the kernel that calls them.
KERNELS = {
    "panel_ahead_rows": linear._linear,
    "panels_rows": few._linear_few,
    "f16": narrow._linear_narrow,
    "w8a32": narrow._linear_narrow,
    "w8a8": int8.linear_int8,
    "panel_rows": tiles.attention_units,
    "panel_columns": tiles.attention_units,
    "places": conv2d._conv2d,
    "depthwise": conv2d._conv2d,
}
# Of bytes, a matrix unit has no loop of dot products.
SLOW = {"w8a8": not DOT.intrinsic or DOT.unit, "f16": not HALF_IN_HARDWARE}
FUSED = r"vfmadd\d+ps|fmla" if TILE.fma else "mulps"
DOT_PRODUCT = r"(\{vex\}\s*)?vpdpbusd|sdot"


@functools.cache
def loops_of(kernel):
    return loops(compiled(kernel))


# Kernels are compiled for these tests alone, which takes long: that of a change is the product of two f32 matrices.
# What the compiler makes of the others' loops by themselves is in test_kernels_assembly.py.
SOON = ("panel_ahead_rows",)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in SOON else pytest.mark.wide) for k in KERNELS if not SLOW.get(k)],
)
def test_the_tiles_are_compiled_as_they_are_written(kind):
    others = {"w8a8": DOT.rows, "panel_ahead_rows": TILING.rows, "panels_rows": max(few.MOST_ROWS, 1)}
    found = [loop for loop in loops_of(KERNELS[kind]) if loop.kind == kind]
    assert {loop.size[0] for loop in found} == set(range(1, others.get(kind, TILE.rows) + 1))
    for loop in found:
        products = loop.size[0] * loop.size[1]
        assert len(loop.multiply_adds) % products == 0, loop
        assert all(re.match(DOT_PRODUCT if kind == "w8a8" else FUSED, line) for line in loop.multiply_adds), loop
        assert not loop.vector_spills, (loop.size, loop.vector_spills)


@pytest.mark.wide
def test_softmax_is_compiled_as_it_is_written():
    found = [loop for loop in loops_of(tiles.attention_units) if loop.kind == "softmax"]
    assert {loop.size for loop in found} == {(vectors,) for vectors in range(1, TILE.vectors + 1)}
    for loop in found:
        assert all(re.match(FUSED, line) for line in loop.multiply_adds), loop
        assert not loop.vector_spills, (loop.size, loop.vector_spills)


@pytest.mark.wide
@pytest.mark.skipif(isa() not in ("avx512", "avx2", "neon"), reason="no fused multiply-add")
def test_a_query_alone_is_multiplied_in_full_vectors():
    # The compiler vectorises these loops itself: query times key, and weight times value.
    own = [loop for loop in loops_of(tiles.attention_units) if not loop.kind]
    assert len(own) >= 2
    for loop in own:
        assert all(re.match(FUSED, line) for line in loop.multiply_adds), loop
        assert not loop.vector_spills, (loop.body, loop.vector_spills)
