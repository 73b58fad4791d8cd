"""The machine that executor and simulator share: what is next, what an exchange does, when slots and runs are over."""

from __future__ import annotations

import pytest

from hepti_mqtt.program import Builder
from hepti_mqtt.schedule import ProgramRun, RunMachine, template


def both(b: Builder) -> int:
    """Two inputs, an op on each, and their sum: ops 2, 3, 4 and the Send 5."""
    x, y = b.recv((1,), "planner", 0), b.recv((1,), "peer", 1)
    late, early = b.compute("add", (y,), (1,)), b.compute("add", (x,), (1,))
    b.send(b.compute("add", (late, early), (1,)), ("planner",), 2)
    return x


def begun(machine: RunMachine[ProgramRun], admission: int) -> ProgramRun:
    b = Builder("me")
    both(b)
    run = ProgramRun(admission, template(b.build()))
    machine.admit(run)
    return run


def fill(machine: RunMachine[ProgramRun], run: ProgramRun, *key: object) -> bool:
    slot = machine.awaited(run, key)
    assert isinstance(slot, int)
    return machine.fill(run, slot)


def test_the_first_ready_op_of_the_first_admission_is_next():
    machine: RunMachine[ProgramRun] = RunMachine()
    second, first = begun(machine, 9), begun(machine, 4)
    assert machine.next() is None
    fill(machine, second, 1, 0, "peer")
    fill(machine, second, 0, 0, "planner")
    fill(machine, first, 0, 0, "planner")
    assert [machine.next() for _ in range(4)] == [(first, 3), (second, 2), (second, 3), None]


def test_an_exchange_fills_its_slot_once():
    machine: RunMachine[ProgramRun] = RunMachine()
    run = begun(machine, 1)
    assert machine.awaited(run, (0, 1, "planner")) == "unexpected"
    assert fill(machine, run, 0, 0, "planner")
    assert machine.awaited(run, (0, 0, "planner")) == "duplicate"


def test_a_slot_is_free_after_its_last_reader_and_a_run_over_after_its_last_op():
    machine: RunMachine[ProgramRun] = RunMachine()
    run = begun(machine, 1)
    fill(machine, run, 0, 0, "planner")
    fill(machine, run, 1, 0, "peer")
    freed = []
    while (found := machine.next()) is not None:
        assert run.left
        freed.append(machine.ran(*found))
    assert freed == [[1], [0], [2, 3], [4]]
    assert not run.left
    assert machine.drop(1) is run
    assert machine.drop(1) is None


def test_what_nobody_reads_is_free_at_once():
    machine: RunMachine[ProgramRun] = RunMachine()
    b = Builder("me")
    x = b.recv((1,), "planner", 0)
    b.compute_many("add", (x,), ((1,), (1,)))
    b.recv((1,), "peer", 1)
    run = ProgramRun(1, template(b.build()))
    machine.admit(run)
    assert not fill(machine, run, 1, 0, "peer")
    assert fill(machine, run, 0, 0, "planner")
    assert machine.ran(*machine.next()) == [1, 2, 0]


def test_a_run_that_was_dropped_is_never_next_and_none_begins_twice():
    machine: RunMachine[ProgramRun] = RunMachine()
    run = begun(machine, 1)
    with pytest.raises(ValueError, match="runs already"):
        begun(machine, 1)
    fill(machine, run, 0, 0, "planner")
    machine.drop(1)
    assert machine.next() is None
