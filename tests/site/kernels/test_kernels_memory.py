"""Memory of kernels: they write to their own alone, and what loading code needed is given back."""

from __future__ import annotations

import ctypes
import sys

import pytest
from programs import PATHS, ROOT, run_python

from hepti_mqtt.kernels import jit

RELEASED = """
import numba, numpy as np
from kernels_support import Case, array
from hepti_mqtt.kernels import warm_up
from hepti_mqtt.kernels import jit

warm_up()
case = Case("add", [array(40, 3), array(40, 3)], [(40, 3)], bias=False)
before = case.run()[0].tobytes()
resident = lambda: sum(
    int(line.split()[1]) for of in open("/proc/self/smaps").read().split("VmFlags") if "libllvmlite" in of
    for line in of.splitlines() if line.startswith("Rss:")
)
kib = resident()
jit.release_compiler()
print(kib, resident(), sum(
    getattr(made.library, "_shared_module", None) is not None
    for dispatcher, _ in jit.registered for made in dispatcher.overloads.values()
))
assert case.run()[0].tobytes() == before
again = numba.njit(lambda x: x + 1)
assert again(2) == 3, "it compiles afterwards too"
"""

LARGE_BLOCKS = """
import ctypes, sys
import numpy as np
from hepti_mqtt.config.process import return_large_blocks

if sys.argv[1] == "returned":
    return_large_blocks()
malloc_info = ctypes.CDLL(None).mallinfo2
malloc_info.restype = type("Info", (ctypes.Structure,), {"_fields_": [(str(n), ctypes.c_size_t) for n in range(10)]})
weights = np.ones(16 << 20, np.uint8)
del weights
others = np.ones(8 << 20, np.uint8)
print(getattr(malloc_info(), "4") >> 20)  # MiB in blocks with pages of their own
"""

compiled_only = pytest.mark.skipif(not jit.JIT, reason="about compiled code")


@pytest.mark.nightly
@compiled_only
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="about glibc's heap")
def test_kernels_leave_memory_alone_that_other_threads_allocate_meanwhile():
    paths = (*PATHS, ROOT / "tests" / "unit" / "kernels")
    run_python(ROOT / "tests" / "helpers" / "memory_watch.py", paths=paths, MALLOC_ARENA_MAX="1")


@pytest.mark.nightly
@compiled_only
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_pages_of_the_compiler_and_bitcode_are_given_back_and_come_back():
    before, after, bitcode = map(int, run_python("-c", RELEASED).split())
    assert after < before / 4, "or LLVM's library has another name"
    assert bitcode == 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="about glibc's heap")
def test_large_blocks_go_back_also_after_larger_ones_were_freed():
    returned, kept = (int(run_python("-c", LARGE_BLOCKS, how)) for how in ("returned", "as it is"))
    assert returned >= 8 > kept
