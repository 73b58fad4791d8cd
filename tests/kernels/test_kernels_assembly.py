"""What the compiler made of the inner loops: one fused multiply-add per product, nothing on the stack."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from assembly import MULTIPLY_ADD, loops

from hepti_mqtt.kernels import jit
from hepti_mqtt.kernels.isa import TILES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not jit.JIT, reason="about compiled code")

# CPU to generate code for; what one multiply-add is called; the register that holds its sum.
CPUS = {
    "skylake-avx512": ("avx512", r"vfmadd\d+ps", "%zmm"),
    "haswell": ("avx2", r"vfmadd\d+ps", "%ymm"),
    "nehalem": ("sse", "mulps", "%xmm"),
    "cortex-a72": ("neon", "fmla", ".4s"),  # Raspberry Pi 4
    "cortex-a76": ("neon", "fmla", ".4s"),  # Raspberry Pi 5
}


@functools.cache
def tile_loops(cpu, rows=""):
    """Return the loops of all tiles, compiled in a process of its own, where the instruction set can be forced."""
    isa = CPUS[cpu][0]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        jit.OVERRIDE: isa,
        # Numba's passes before ours: any old CPU, so that they use no vectors that the target lacks.
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("assembly.py")), isa, cpu, rows],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return loops(done.stdout)


@pytest.fixture(params=CPUS)
def cpu(request):
    return request.param


def test_every_tile_has_a_loop(cpu):
    tile = TILES[CPUS[cpu][0]]
    assert {(loop.rows, loop.vectors) for loop in tile_loops(cpu)} >= {
        (r, tile.vectors) for r in range(1, tile.rows + 1)
    }


def test_as_many_multiply_adds_as_products(cpu):
    tile = TILES[CPUS[cpu][0]]
    # Where an instruction takes one lane, the loop does as many steps of k as a vector has lanes, and another the rest.
    steps = {1, tile.lanes} if tile.lane_broadcast else {1}
    for loop in tile_loops(cpu):
        products = loop.rows * loop.vectors
        if (loop.rows, loop.vectors) == (tile.rows, tile.vectors):
            assert len(loop.multiply_adds) in {s * products for s in steps}, loop
        # The compiler may do several steps of a small tile at once.
        assert len(loop.multiply_adds) % products == 0, loop


def test_a_multiply_add_is_one_instruction(cpu):
    name = CPUS[cpu][1]
    for loop in tile_loops(cpu):
        assert all(re.match(name, line) for line in loop.multiply_adds), loop
        assert TILES[CPUS[cpu][0]].fma != any(re.match(r"v?mulps|v?addps|fmul|fadd", line) for line in loop.body)


def test_sums_stay_in_full_registers(cpu):
    _, _, register = CPUS[cpu]
    for loop in tile_loops(cpu):
        assert all(register in line for line in loop.multiply_adds), loop


def test_nothing_is_kept_on_the_stack(cpu):
    for loop in tile_loops(cpu):
        assert not loop.spills, (loop.tile, loop.spills)


@pytest.mark.parametrize(
    ("cpu", "rows"), [("skylake-avx512", 16), ("haswell", 16), ("nehalem", 16), ("cortex-a72", 20)]
)
def test_a_tile_that_is_too_high_is_found_out(cpu, rows):
    highest = [loop for loop in tile_loops(cpu, str(rows)) if loop.rows == rows]
    assert highest
    assert all(loop.spills for loop in highest if loop.vectors == TILES[CPUS[cpu][0]].vectors)


def test_a_loop_is_read_as_it_is():
    (loop,) = loops(
        """
hepti_tile_rows_1x2:
	vmovups	8(%rsp), %ymm9
.LBB0_1:
	vbroadcastss	(%rdi), %ymm2
	vfmadd231ps	(%rsi), %ymm2, %ymm0
	vmovups	%ymm0, 32(%rsp)
	vfmadd231ps	32(%rsi), %ymm2, %ymm1
	jne	.LBB0_1
	retq
.Lfunc_end0:
"""
    )
    assert (loop.rows, loop.vectors, len(loop.body)) == (1, 2, 5)
    assert len(loop.multiply_adds) == 2
    assert loop.spills == ["vmovups	%ymm0, 32(%rsp)"]
    assert not MULTIPLY_ADD.match("vmulps	%ymm0, %ymm1, %ymm2")
