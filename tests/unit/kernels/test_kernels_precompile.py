"""Filling the compile cache: processes that compile, one at a time per cache, and what happens when one ends early."""

from __future__ import annotations

import sys
import threading

import pytest

from hepti_mqtt.kernels import jit, precompile, tape
from hepti_mqtt.kernels.compile_cache import compile_lock
from hepti_mqtt.kernels.precompile import Compilers

compiled_only = pytest.mark.skipif(not jit.JIT, reason="about compiled code")


class Waited(Exception):
    """Another one holds the lock."""


def wait():
    raise Waited


def compilers(code, most=2):
    """Return processes that run this code for each line that they read, as `precompile.main` does."""
    return Compilers([sys.executable, "-S", "-c", f"import sys\nfor line in sys.stdin:\n    {code}"], most)


def test_every_kernel_is_compiled_by_one_of_the_processes(tmp_path):
    looks = []
    with compilers(
        f"open({str(tmp_path)!r} + '/' + line.strip(), 'x').close(); print(line, end='', flush=True)"
    ) as made:
        made.compile(range(7), lambda: looks.append(1))
        made.compile([7], lambda: looks.append(1))
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == list(range(8))
    assert looks


ENDED = [[sys.executable, "-S", "-c", f"import sys; sys.exit({code})"] for code in (0, 1)]


@pytest.mark.parametrize("command", [*ENDED, ["/nowhere/python"]])
def test_processes_that_end_early_or_cannot_start_are_not_replaced_for_ever(command):
    with Compilers(command, 2) as made:
        made.compile(range(5), lambda: None)
        made.compile(range(5), lambda: None)


def test_what_one_process_leaves_the_other_compiles(tmp_path):
    code = f"sys.exit(1) if line == '3\\n' else (open({str(tmp_path)!r} + '/' + line.strip(), 'x').close(), "
    with compilers(code + "print(line, end='', flush=True))") as made:
        made.compile(range(7), lambda: None)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [0, 1, 2, 4, 5, 6]


def test_one_holds_the_lock_of_a_cache_at_a_time(tmp_path):
    with compile_lock(tmp_path), pytest.raises(Waited), compile_lock(tmp_path, wait):
        pass
    with compile_lock(tmp_path, wait):
        pass


def test_a_lock_is_waited_for(tmp_path):
    held, freed = threading.Event(), threading.Event()

    def hold():
        with compile_lock(tmp_path):
            held.set()
            freed.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    with compile_lock(tmp_path, freed.set):
        assert freed.is_set()
    holder.join()


def test_without_a_place_to_write_to_nothing_is_locked(tmp_path):
    (tmp_path / "file").touch()
    for place in (None, tmp_path / "file" / "below"):
        with compile_lock(place), compile_lock(place, wait):
            pass


# Not beside other tests, whose processes write to the same cache; `make kernels` checks it before each suite.
@pytest.mark.nightly
@compiled_only
def test_after_warm_up_everything_is_in_the_cache_and_no_process_is_started(monkeypatch):
    if jit.cache_directory() is None:
        pytest.skip("a forced instruction set has no cache")
    jit.warm_up()
    tape.prepare()
    monkeypatch.setattr(precompile, "Compilers", lambda *_: pytest.fail("nothing is missing"))
    told = []
    precompile.fill_cache("all", lambda *step: told.append(step))
    assert told == [(len(jit.registered), len(jit.registered))]
    assert jit.all_ready()
