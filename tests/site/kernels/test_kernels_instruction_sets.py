"""The kernels' tests once more, with every other instruction set that this machine can run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels_support import ALONE, runnable

from hepti_mqtt.kernels.cpu import OVERRIDE
from hepti_mqtt.kernels.jit import JIT

KERNELS = Path(__file__).parents[2] / "unit" / "kernels"

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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(KERNELS / file)]
    environment = {**os.environ, OVERRIDE: name, ALONE: AGAIN[file]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
