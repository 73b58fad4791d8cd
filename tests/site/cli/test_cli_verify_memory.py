"""`hepti model verify` keeps the weights of one op in memory, whatever the size of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixture_file import Shape, write_mixture
from programs import run_python

MEASURED = """
import sys
from programs import memory_bytes
from hepti_mqtt.cli.main import main
code = main(["model", "--json", "verify", sys.argv[1]])
print(memory_bytes()[1])
sys.exit(code)
"""


def peak_bytes(model):
    return int(run_python("-c", MEASURED, model).split()[-1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of resident memory from /proc")
@pytest.mark.parametrize(
    ("shape", "more"),
    [
        (Shape(1, hidden=512, heads=8, experts=32, chosen=2, width=512, vocabulary=1000), {"layers": 5}),
        pytest.param(
            Shape(1, hidden=256, heads=2, kv_heads=1, experts=4, chosen=2, width=64, vocabulary=30_000),
            {"hidden": 8192},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["layers", "table of words"],
)
def test_a_larger_file_takes_no_more_memory(tmp_path, shape, more):
    small = write_mixture(tmp_path / "small.gguf", shape)
    large = write_mixture(tmp_path / "large.gguf", shape._replace(**more))
    assert peak_bytes(large) - peak_bytes(small) < (large.stat().st_size - small.stat().st_size) / 4
