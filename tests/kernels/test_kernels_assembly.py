"""What the compiler makes of the inner loops on every CPU: one instruction for each product, no sum on the stack."""

from __future__ import annotations

import functools
import re
from itertools import product

import pytest
from assembly import KINDS, MATMUL, MULTIPLY_ADD, Loop, Target, loops, written

from hepti_mqtt.kernels.gemm import few
from hepti_mqtt.kernels.gemm.tilings import TILINGS
from hepti_mqtt.kernels.machine import jit
from hepti_mqtt.kernels.machine.isa import DOTS, TILES

pytestmark = pytest.mark.skipif(not jit.JIT, reason="about compiled code")

# CPU to generate code for, its register tile and its int8 tile.
CPUS = {
    "cascadelake": ("avx512", "avx512vnni"),
    "znver4": ("avx512", "avx512vnni"),
    "sapphirerapids": ("avx512", "amx"),
    "alderlake": ("avx2", "avxvnni"),
    "haswell": ("avx2", "plain"),
    "nehalem": ("sse", "plain"),
    "cortex-a72": ("neon", "plain"),  # Raspberry Pi 4
    "cortex-a76": ("neon", "dotprod"),  # Raspberry Pi 5
    "generic": ("neon", "dotprod"),  # a CPU of which LLVM knows nothing; Linux tells that it has sdot
}
ONE = "cortex-a76"
# What one multiply-add, one dot product, and the widening of a half and of a byte are called; a full register.
WORDS = {
    "avx512": (r"vfmadd\d+ps", "vpdpbusd", "vcvtph2ps", "vcvtdq2ps", "%zmm"),
    "avx2": (r"vfmadd\d+ps", r"\{vex\}\s*vpdpbusd", "vcvtph2ps", "vcvtdq2ps", "%ymm"),
    "sse": ("mulps", None, None, "cvtdq2ps", "%xmm"),
    "neon": ("fmla", "sdot", "fcvtl", "scvtf", ".4s"),
}
# Products of 2**x in a softmax: five terms, and on a CPU without multiply-add the exponent's own.
TERMS = 5
# A size that no register file holds, of rows and, for softmax, of vectors.
TOO_HIGH = {"avx512": 16, "avx2": 16, "sse": 16, "neon": 20}

# Whose loops have the steps of k that `Tile.steps` says.
WRITTEN_OUT = (*MATMUL, "f16", "w8a32", "w8a8")

APART = ("copy", "panels_rows", "stream_f16", "stream_w8a32", "unit_w8a8")
WITH_PRODUCTS = [kind for kind in KINDS if kind not in APART]


def target(cpu):
    isa, dot = CPUS[cpu]
    return Target(cpu, isa, TILES[isa], DOTS[dot])


# Without an instruction for it, int8 products and halves are right but slow: nothing is claimed of their code.
CASES = [
    (cpu, kind)
    for cpu, (_, dot) in CPUS.items()
    for kind in WITH_PRODUCTS
    if not (kind == "w8a8" and dot == "plain") and not (kind == "f16" and not target(cpu).half_in_hardware)
]


def wide_but_for_one(cases):
    """Return the cases as parameters; those of all CPUs but one are wide, and the machine's own has its own file."""
    cpu_of = [case if isinstance(case, str) else case[0] for case in cases]
    marks = [[] if cpu == ONE else pytest.mark.wide for cpu in cpu_of]
    return [pytest.param(*([c] if isinstance(c, str) else c), marks=m) for c, m in zip(cases, marks, strict=True)]


every_case = pytest.mark.parametrize(("cpu", "kind"), wide_but_for_one(CASES))


@functools.cache
def tile_loops(kind, on):
    return loops(written(kind, on))


def products(loop, on):
    """Return how many products, in vectors, a step of the loop adds."""
    if loop.kind == "softmax":
        return loop.size[0] * (TERMS if on.tile.fma else TERMS + 1)
    return loop.size[0] * loop.size[1]


def largest(kind, on):
    if kind == "softmax":
        return (on.tile.vectors,)
    tile = on.dot if kind == "w8a8" else on.tile
    return (tile.rows, tile.vectors)


@every_case
def test_every_tile_has_a_loop(cpu, kind):
    on = target(cpu)
    found = {loop.size for loop in tile_loops(kind, on)}
    rows, *vectors = (range(1, size + 1) for size in largest(kind, on))
    if kind in ("f16", "w8a32"):  # whole panels alone
        vectors = [[on.tile.vectors]]
    assert found == set(product(rows, *vectors))


@every_case
def test_as_many_multiply_adds_as_products(cpu, kind):
    on = target(cpu)
    for loop in tile_loops(kind, on):
        # The compiler may do several steps of a small tile at once.
        assert len(loop.multiply_adds) % products(loop, on) == 0, loop


@every_case
def test_the_largest_tile_is_one_step_or_two_or_as_many_as_are_written(cpu, kind):
    on = target(cpu)
    steps = {1, 2}
    if kind in MATMUL and on.tile.lane_broadcast:
        # Where an instruction takes one lane, a loop does as many steps of k as a vector has lanes.
        steps.add(on.tile.lanes)
    elif kind in WRITTEN_OUT:
        steps.add(on.tile.steps)
    biggest = [loop for loop in tile_loops(kind, on) if loop.size == largest(kind, on)]
    assert biggest
    if kind in WRITTEN_OUT and on.tile.steps:
        assert any(len(loop.multiply_adds) == on.tile.steps * products(loop, on) for loop in biggest)
    for loop in biggest:
        assert len(loop.multiply_adds) in {s * products(loop, on) for s in steps}, loop


@every_case
def test_a_product_is_added_by_one_instruction(cpu, kind):
    on = target(cpu)
    multiply_add, dot_product, *_ = WORDS[on.isa]
    for loop in tile_loops(kind, on):
        assert all(re.match(dot_product if kind == "w8a8" else multiply_add, line) for line in loop.multiply_adds), loop
        if kind != "softmax":  # whose argument and sum take additions of their own
            apart = [line for line in loop.body if re.match(r"v?mulps|v?addps|fmul|fadd|v?paddd|add\s+v|mul\s+v", line)]
            assert on.tile.fma != bool(apart), (loop, apart)


@every_case
def test_sums_stay_in_full_registers(cpu, kind):
    on = target(cpu)
    for loop in tile_loops(kind, on):
        assert all(WORDS[on.isa][-1] in line for line in loop.multiply_adds), loop


@pytest.mark.parametrize(("cpu", "kind"), wide_but_for_one([c for c in CASES if c[1] in ("f16", "w8a32")]))
def test_a_weight_is_widened_once_for_all_rows(cpu, kind):
    on = target(cpu)
    name = WORDS[on.isa][2 if kind == "f16" else 3]
    for loop in tile_loops(kind, on):
        steps = len(loop.multiply_adds) // products(loop, on)
        assert len(loop.conversions) == steps * on.tile.vectors, loop
        assert all(line.startswith(name) for line in loop.conversions), loop


@every_case
def test_nothing_is_kept_on_the_stack(cpu, kind):
    on = target(cpu)
    for loop in tile_loops(kind, on):
        # Of a panel's last columns the compiler does up to eight steps at once (Zen), and may run out of registers for
        # addresses; of the vectors there are enough.
        narrow = kind != "softmax" and loop.size[1] < largest(kind, on)[1]
        assert not (loop.vector_spills if narrow else loop.spills), (loop.size, loop.spills)


@pytest.mark.parametrize(
    ("cpu", "kind"), wide_but_for_one([c for c in CASES if c[1] in ("panel_ahead_rows", "f16", "w8a32", "w8a8")])
)
def test_what_is_needed_next_is_fetched_ahead(cpu, kind):
    found = tile_loops(kind, target(cpu))
    fetching = {loop.size for loop in found if loop.prefetches}
    assert fetching == {loop.size for loop in found}
    if kind == "panel_ahead_rows":  # which fetches the next piece, or nothing
        assert fetching == {loop.size for loop in found if not loop.prefetches}


@pytest.mark.parametrize("cpu", wide_but_for_one(list(CPUS)))
def test_only_what_asks_for_it_fetches_ahead(cpu):
    for kind in ("panel_rows", "panel_columns"):
        assert not any(loop.prefetches for loop in tile_loops(kind, target(cpu)))


TILES_OF_ALL = [(cpu, tiling.name) for cpu, (isa, _) in CPUS.items() for tiling in TILINGS[isa]]


@pytest.mark.parametrize(("cpu", "name"), wide_but_for_one(TILES_OF_ALL))
def test_every_tile_that_may_be_chosen_adds_in_full_registers(cpu, name):
    on = target(cpu)
    (tiling,) = [t for t in TILINGS[on.isa] if t.name == name]
    on = on._replace(tile=tiling.tile(on.tile))
    multiply_add, *_, full = WORDS[on.isa]
    found = tile_loops("panel_ahead_rows", on)
    assert {loop.size for loop in found} == set(product(range(1, tiling.rows + 1), range(1, tiling.vectors + 1)))
    for loop in found:
        steps, rest = divmod(len(loop.multiply_adds), products(loop, on))
        assert not rest, loop
        if tiling.steps == 1 or (loop.size[1] == tiling.vectors and tiling.steps):
            assert steps in {1, min(tiling.steps, 2) if loop.prefetches else tiling.steps}, loop
        assert all(re.match(multiply_add, line) and full in line for line in loop.multiply_adds), loop
        assert not (loop.spills if loop.size[1] == tiling.vectors else loop.vector_spills), (loop.size, loop.spills)


@pytest.mark.parametrize("cpu", wide_but_for_one(list(CPUS)))
def test_a_tile_over_several_panels_has_enough_sums_and_none_on_the_stack(cpu):
    on = target(cpu)
    multiply_add, *_, full = WORDS[on.isa]
    found = tile_loops("panels_rows", on)
    assert {loop.size for loop in found} == set(few.sizes(on.tile))
    assert max(rows * vectors for rows, vectors in few.sizes(on.tile)) == (4 if on.isa == "avx512" else 8)
    for loop in found:
        assert len(loop.multiply_adds) % products(loop, on) == 0, loop
        assert all(re.match(multiply_add, line) and full in line for line in loop.multiply_adds), loop
        assert not loop.vector_spills, (loop.size, loop.vector_spills)


@pytest.mark.parametrize(("cpu", "kind"), wide_but_for_one([c for c in CASES if c[1] in ("f16", "w8a32")]))
def test_a_stream_over_several_panels_widens_each_weight_once(cpu, kind):
    on = target(cpu)
    found = tile_loops(f"stream_{kind}", on)
    assert {loop.size for loop in found} >= set(few.sizes(on.tile))
    for loop in found:
        steps, rest = divmod(len(loop.multiply_adds), products(loop, on))
        assert not rest, loop
        assert len(loop.conversions) == steps * loop.size[1], loop
        assert loop.prefetches, loop
        assert not loop.vector_spills, (loop.size, loop.vector_spills)


def test_a_high_tile_that_the_compiler_unrolls_is_found_out():
    on = target("znver4")
    (tiling,) = [t for t in TILINGS["avx512"] if t.name == "12x2x512"]
    on = on._replace(tile=tiling._replace(steps=2).tile(on.tile))
    assert any(loop.vector_spills for loop in tile_loops("panel_ahead_rows", on))


# That the others are found out shows this file's own eyes, not the kernels.
HIGH = [
    pytest.param(*case, marks=[] if case in {(ONE, "panel_rows"), (ONE, "softmax")} else pytest.mark.wide)
    for case in CASES
]


@pytest.mark.parametrize(("cpu", "kind"), HIGH)
def test_a_tile_that_is_too_high_is_found_out(cpu, kind):
    on = target(cpu)
    most = TOO_HIGH[on.isa]
    # With steps written out, LLVM compiles no tile that the registers cannot hold.
    high = on._replace(
        tile=on.tile._replace(vectors=most) if kind == "softmax" else on.tile._replace(rows=most, steps=0),
        dot=on.dot._replace(rows=most),
    )
    size = largest(kind, high)
    highest = [loop for loop in loops(written(kind, high, [size])) if loop.size == size]
    assert highest
    assert all(loop.vector_spills for loop in highest)


def test_a_loop_is_read_as_it_is():
    (loop,) = loops(
        """
hepti_panel_rows_1x2:
	vmovups	8(%rsp), %ymm9
.LBB0_1:
	vbroadcastss	(%rdi), %ymm2
	vfmadd231ps	(%rsi), %ymm2, %ymm0
	vmovups	%ymm0, 32(%rsp)
	movq	8(%rsp), %rax
	prefetcht0	2048(%rsi)
	vcvtph2ps	(%rsi), %ymm3
	vfmadd231ps	32(%rsi), %ymm2, %ymm1
	jne	.LBB0_1
	retq
.Lfunc_end0:
"""
    )
    assert (loop.kind, loop.size, len(loop.body)) == ("panel_rows", (1, 2), 8)
    assert len(loop.multiply_adds) == 2
    assert loop.spills == ["vmovups	%ymm0, 32(%rsp)", "movq	8(%rsp), %rax"]
    assert loop.vector_spills == ["vmovups	%ymm0, 32(%rsp)"]
    assert loop.prefetches == ["prefetcht0	2048(%rsi)"]
    assert loop.conversions == ["vcvtph2ps	(%rsi), %ymm3"]
    assert not MULTIPLY_ADD.match("vmulps	%ymm0, %ymm1, %ymm2")


def test_a_loop_of_aarch64_is_read_too():
    (loop,) = loops(
        """
hepti_w8a8_1:
.LBB3_2:
	ldp	q24, q25, [x3], #32
	sdot	v23.4s, v26.16b, v24.16b
	str	q23, [sp, #16]
	ldr	x8, [sp, #8]
	prfm	pldl1keep, [x3, #2048]
	b.ne	.LBB3_2
	ret
.Lfunc_end3:
"""
    )
    assert loop == Loop("w8a8", (1,), loop.body)
    assert loop.multiply_adds == ["sdot	v23.4s, v26.16b, v24.16b"]
    assert loop.vector_spills == ["str	q23, [sp, #16]"]
    assert len(loop.spills) == 2
    assert len(loop.prefetches) == 1


@pytest.mark.parametrize("vectors", range(1, 5))
def test_the_matrix_unit_loads_codes_once_for_all_vectors_of_a_panel(vectors):
    code = written("unit_w8a8", target("sapphirerapids"), [(1, vectors)])
    # In the loop over k with and without fetching, and for what is left of it; sums leave the registers once.
    assert code.count("tdpbusd") == 3 * vectors
    assert code.count("tileloadd") == 3 * (vectors + 1)
    assert code.count("tilestored") == vectors
    assert not re.search(r"\(%rsp.*%zmm|%zmm.*\(%rsp", code)
    # Its rows are scaled in full registers, what belongs to columns loaded before.
    (rows,) = (body for body in re.findall(r"^\.LBB\w+:\n((?:\t(?!j\w+).*\n)*)\tj", code, re.M) if "vcvtdq2ps" in body)
    assert rows.count("vcvtdq2ps") == vectors
    assert rows.count("vbroadcastss") <= 2
    assert len(re.findall("vfn?madd", rows)) == 2 * vectors
