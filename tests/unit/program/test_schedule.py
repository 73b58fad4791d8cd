"""The run machine of executor and simulator: the next op, the effect of an exchange, the end of slots and runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_builder import ProgramBuilder

from hepti_mqtt.core.program import Recv, slots_written
from hepti_mqtt.core.schedule import ProgramRun, RunMachine, make_template, stretches_of


def both(b):
    """Two inputs, an op on each, and their sum: ops 2, 3, 4 and the Send 5."""
    x, y = b.recv((1,), "planner", 0), b.recv((1,), "peer", 1)
    late, early = b.compute("add", (y,), (1,)), b.compute("add", (x,), (1,))
    b.send(b.compute("add", (late, early), (1,)), ("planner",), 2)
    return x


def begun(machine, run_id):
    b = ProgramBuilder("me")
    both(b)
    run = ProgramRun(run_id, make_template(b.build()))
    machine.admit(run)
    return run


def fill(machine, run, *key):
    slot = machine.slot_for(run, key)
    assert isinstance(slot, int)
    return machine.fill_slot(run, slot)


def test_the_first_ready_op_of_the_first_admission_is_next():
    machine = RunMachine()
    second, first = begun(machine, 9), begun(machine, 4)
    assert machine.next_op() is None
    fill(machine, second, 1, 0, "peer")
    fill(machine, second, 0, 0, "planner")
    fill(machine, first, 0, 0, "planner")
    assert [machine.next_op() for _ in range(4)] == [(first, 3), (second, 2), (second, 3), None]


def test_an_exchange_fills_its_slot_once():
    machine = RunMachine()
    run = begun(machine, 1)
    assert machine.slot_for(run, (0, 1, "planner")) == "unexpected"
    assert fill(machine, run, 0, 0, "planner")
    assert machine.slot_for(run, (0, 0, "planner")) == "duplicate"


def test_a_run_that_was_dropped_is_never_next_and_none_begins_twice():
    machine = RunMachine()
    run = begun(machine, 1)
    with pytest.raises(ValueError):
        begun(machine, 1)
    fill(machine, run, 0, 0, "planner")
    machine.remove(1)
    assert machine.next_op() is None


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_ops_begin_when_all_that_they_read_is_there_and_a_slot_is_over_after_its_last_reader(rng, ops):
    program = any_program(rng, ops)
    machine = RunMachine()
    run = ProgramRun(1, make_template(program))
    machine.admit(run)
    inputs = [op for op in program.ops if isinstance(op, Recv)]
    rng.shuffle(inputs)
    places = [place for place, op in enumerate(program.ops) if not isinstance(op, Recv)]
    filled, over = set(), []
    while places or inputs:
        ready = [p for p in places if filled.issuperset(program.reads(program.ops[p]))]
        if inputs and (not ready or rng.random() < 0.5):
            op = inputs.pop()
            filled.add(op.slot)
            assert machine.fill_slot(run, machine.slot_for(run, op.key)) == any(
                op.slot in program.reads(o) for o in program.ops
            )
            continue
        assert machine.next_op() == (run, ready[0])
        places.remove(ready[0])
        op = program.ops[ready[0]]
        filled.update(slots_written(op))
        still = {slot for p in places for slot in program.reads(program.ops[p])}
        freed = machine.finish_op(run, ready[0])
        assert sorted(freed) == sorted({*slots_written(op), *program.reads(op)} - still)
        over += freed
    assert machine.next_op() is None
    assert not run.ops_left
    assert len(set(over)) == len(over)


def test_ops_of_a_stretch_run_in_turn_whichever_exchange_is_first_and_show_their_results_together():
    b = ProgramBuilder("me")
    x, y = b.recv((1,), "one", 0), b.recv((1,), "other", 1)
    first, second = b.compute("add", (x,), (1,)), b.compute("add", (y,), (1,))
    both = b.compute("add", (first, second), (1,))
    for slot in (second, both):
        b.send(slot, ("planner",), slot)
    program = b.build()
    machine: RunMachine[ProgramRun] = RunMachine()
    run = ProgramRun(1, make_template(program, stretches_of(program), by_op=True))
    machine.admit(run)
    fill(machine, run, 1, 0, "other")
    assert machine.next_op() is None
    fill(machine, run, 0, 0, "one")
    for place in (2, 3, 4):
        assert [machine.next_op(), machine.next_op()] == [(run, place), None]
        machine.finish_op(run, place)
    assert [machine.next_op() for _ in range(3)] == [(run, 5), (run, 6), None]


def any_program(rng, ops):
    """Return a Program of ops that read some earlier slots, one or several times, and write one or two."""
    b = ProgramBuilder("me")
    slots = [b.recv((1,), "peer", n) for n in range(rng.randint(1, 4))]
    for _ in range(ops):
        reads = rng.choices(slots, k=rng.randint(1, 3))
        if rng.random() < 0.3:
            b.send(reads[0], ("peer",), 9)
        else:
            slots += b.compute_many("add", reads, [(1,)] * rng.randint(1, 2))
    return b.build()
