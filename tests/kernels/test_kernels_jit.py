from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels_support import Case, array, pool

from hepti_mqtt.kernels import KERNELS, jit, warm_up

ROOT = Path(__file__).parents[2]
COUNT_CACHE = """
from hepti_mqtt.kernels import jit
del jit.registered[2:]  # two are enough to see, and all take seconds
jit.compile_all()
stats = [d.stats for d, _ in jit.registered]
print(sum(sum(s.cache_hits.values()) for s in stats), sum(sum(s.cache_misses.values()) for s in stats))
"""

compiled_only = pytest.mark.skipif(not jit.JIT, reason="about compiled code")


def python(*arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_table_is_complete():
    assert set(KERNELS) == {
        *("linear", "attention", "attention_block", "attention_combine", "layer_norm", "add_norm", "add"),
        *("concat_rows", "concat_columns", "take_rows", "embed_tokens", "patchify", "prepend_positions"),
        *("softmax", "rms_norm", "add_rms_norm"),
        *("mean_rows", "normalize_rows", "to_f16", "from_f16", "to_i8", "from_i8"),
    }
    assert all(name == kernel.name for name, kernel in KERNELS.items())


@compiled_only
def test_nothing_compiles_after_warm_up():
    warm_up()
    warm_up()
    case = Case("add", [array(2, 3), array(2, 3)], [(2, 3)], bias=False)
    case.run()
    assert all(len(dispatcher.signatures) == 1 for dispatcher, _ in jit.registered)
    with pool(1) as workers:
        run = case.kernel.bind(case.op, case.slots, case.weights, workers)
    with pytest.raises(TypeError, match="No matching definition"):
        run([a.astype("f8") for a in case.reads], case.reads)


@compiled_only
def test_every_kernel_has_the_flags_of_the_decorator():
    for dispatcher, _ in jit.registered:
        options = dispatcher.targetoptions
        assert options["nogil"]
        assert not options["boundscheck"]
        assert options["error_model"] == "numpy"
        assert not {"nnan", "ninf", "fast"} & set(options["fastmath"])


@compiled_only
def test_the_cache_of_a_kernel_ages_with_the_whole_package():
    if os.environ.get(jit.OVERRIDE):
        pytest.skip("a forced instruction set has no cache")
    for dispatcher, _ in jit.registered:
        assert dispatcher._cache._cache_file._source_stamp == jit._sources_stamp()


@compiled_only
def test_a_machine_without_a_writable_directory_has_no_cache():
    class Unwritable:
        def enable_caching(self):
            raise RuntimeError("cannot cache function: no locator available")

    assert jit._cached(Unwritable()) is None


@compiled_only
def test_the_second_process_compiles_nothing(tmp_path):
    first = python("-c", COUNT_CACHE, NUMBA_CACHE_DIR=str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert first.stdout.split() == ["0", "2"]
    second = python("-c", COUNT_CACHE, NUMBA_CACHE_DIR=str(tmp_path))
    assert second.returncode == 0, second.stderr
    assert second.stdout.split() == ["2", "0"]


@compiled_only
def test_the_kernels_give_the_same_as_plain_python():
    done = python(
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/kernels",
        "-k",
        "not threads and not bits and not more_keys and not any_split and not every_number_of_rows",
        NUMBA_DISABLE_JIT="1",
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout
