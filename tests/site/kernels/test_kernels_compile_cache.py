"""Compiled code that is kept: damaged files, and several who save at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from numba.core.caching import IndexDataCacheFile
from programs import run_python

from hepti_mqtt.kernels import jit
from hepti_mqtt.kernels.compile_cache import make_robust

KEYS = 40

# Compiles one kernel, or takes it from the cache, and says which.
ONE_KERNEL = """
from hepti_mqtt.kernels import registry
from hepti_mqtt.kernels import jit
[(dispatcher, arguments)] = [r[:2] for r in jit.registered if r[0].py_func.__name__ == "_pool_rows"]
print(jit.in_cache(dispatcher, arguments))
jit.entry_of(dispatcher, arguments)
print(jit.in_cache(dispatcher, arguments), dispatcher.stats.cache_hits.get(arguments, 0))
"""


def opened(directory):
    """Return a cache of one file, as a process has it that begins."""
    file = IndexDataCacheFile(str(directory), "shared", "stamp of Numba's own")
    cache = SimpleNamespace(cache_path=str(directory), _cache_file=file, load_overload=None)
    cache.save_overload = lambda *compiled: file.save(*compiled)  # noqa: PLW0108  (which is replaced in `make_robust`)
    make_robust(cache, "stamp")
    return cache


def test_what_several_save_at_once_into_one_file_is_all_there(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        caches = [opened(tmp_path) for _ in range(4)]
        list(pool.map(lambda i: caches[i % 4].save_overload(f"key {i}", f"code {i}" * 1000), range(KEYS)))
    fresh = opened(tmp_path)._cache_file
    assert [fresh.load(f"key {i}") for i in range(KEYS)] == [f"code {i}" * 1000 for i in range(KEYS)]


@pytest.mark.skipif(not jit.JIT, reason="about compiled code")
@pytest.mark.parametrize(
    ("ending", "left"),
    [
        ("nbi", 0.5),
        *(pytest.param("nbi", left, marks=pytest.mark.nightly) for left in (0.0, 1.0)),
        *(pytest.param("nbc", left, marks=pytest.mark.nightly) for left in (0.0, 0.5, 1.0)),
    ],
)  # 1.0: of zeros
def test_a_file_that_a_power_cut_has_damaged_is_compiled_again(tmp_path, kept_code, ending, left):
    for path, whole in kept_code.items():
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        damaged = bytes(len(whole)) if left == 1 else whole[: int(left * len(whole))]
        place.write_bytes(damaged if path.suffix == f".{ending}" else whole)
    assert one_kernel(tmp_path) == "False\nTrue 0\n", "it is made again"
    assert one_kernel(tmp_path) == "True\nTrue 1\n", "and the damaged file is whole again"


@pytest.fixture(scope="module")
def kept_code(tmp_path_factory):
    """Return the files of a cache with one kernel in it."""
    directory = tmp_path_factory.mktemp("kept")
    assert one_kernel(directory) == "False\nTrue 0\n"
    return {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*.nb?")}


def one_kernel(directory):
    return run_python("-c", ONE_KERNEL, NUMBA_CACHE_DIR=str(directory))
