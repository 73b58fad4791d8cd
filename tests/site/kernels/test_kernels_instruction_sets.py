"""The kernels' tests once more, with every other instruction set that this machine can run."""

from __future__ import annotations

import os

import pytest
from kernels_support import ALONE, runnable
from programs import ROOT, run_python

from hepti_mqtt.kernels.cpu import OVERRIDE
from hepti_mqtt.kernels.jit import JIT

KERNELS = ROOT / "tests" / "unit" / "kernels"

# The test files that run again, and the modules whose kernels they need.
AGAIN = {
    "test_kernels_gemm.py": "linear gemv quantised threads",
    "test_kernels_conv.py": "conv2d windows linear rowwise threads",
    "test_kernels_bands.py": "conv2d threads",
    "test_kernels_attention_reordered.py": "attention threads",
    "test_kernels_attention_cache.py": "attention attention_few attention_tile threads",
    "test_kernels_blocks.py": "block_product threads",
}


@pytest.mark.nightly
@pytest.mark.skipif(not JIT or OVERRIDE in os.environ, reason="runs the tests of compiled code once again")
@pytest.mark.parametrize("file", AGAIN)
@pytest.mark.parametrize("name", runnable())
def test_the_kernels_with_every_instruction_set_of_this_machine(name, file):
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", KERNELS / file, **{OVERRIDE: name, ALONE: AGAIN[file]})
