"""The executor: the next op, repeated frames, reused buffers, and Programs of one device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from program_builder import ProgramBuilder
from sites import FAMILIES, TOLERANCE, plan, request, tensors

from hepti_mqtt import models
from hepti_mqtt.cost.memory import live_bytes
from hepti_mqtt.kernels import Workers
from hepti_mqtt.runtime.worker.executor import Executor, bind, run_local
from hepti_mqtt.strategies.plan_programs import device_program

X = np.arange(4, dtype=np.float32).reshape(2, 2)


def two_sources() -> ProgramBuilder:
    """d = (a + a) and (a + b); b comes from a peer, so the first sum can run before it."""
    b = ProgramBuilder("me")
    x = b.recv((2, 2), "planner", 0)
    y = b.recv((2, 2), "peer", 1)
    late = b.compute("add", (x, y), (2, 2), bias=False)
    early = b.compute("add", (x, x), (2, 2), bias=False)
    b.send(b.compute("add", (late, early), (2, 2), bias=False), ("planner",), 3)
    return b


def started(run_id: int = 1, executor: Executor | None = None) -> Executor:
    executor = executor or Executor()
    executor.admit(run_id, bind(two_sources().build(), {}, Workers(1)))
    return executor


def test_ready_ops_run_during_an_outstanding_exchange():
    executor = started()
    assert executor.next_step() is None
    executor.deliver(1, (0, 0, "planner"), X)
    step = executor.next_step()
    assert step.place == 3
    step.run()
    assert executor.next_step() is None
    assert executor.deliver(1, (1, 0, "peer"), 10 * X) == "filled"
    outgoing = None
    while (step := executor.next_step()) is not None:
        outgoing = step.run()
    np.testing.assert_array_equal(outgoing.array, 13 * X)
    assert executor.finish_if_done(1)
    assert executor.run_ids == ()


def test_buffers_are_kept_within_the_programs_own_accounting():
    b = ProgramBuilder("me")
    shape = (16, 16)
    x = b.recv(shape, "planner", 0)
    for _ in range(50):
        x = b.compute("add", (x, x), shape, bias=False)
    b.send(x, ("planner",), 3)
    program = b.build()
    executor, bound = Executor(), bind(program, {}, Workers(1))
    for run_id in range(3):
        executor.admit(run_id, bound)
        executor.deliver(run_id, (0, 0, "planner"), np.zeros(shape, np.float32))
        while (step := executor.next_step()) is not None:
            step.run()
        assert executor.finish_if_done(run_id)
    assert 0 < executor.cached_bytes() <= live_bytes(program)
    executor.free_buffers()
    assert executor.cached_bytes() == 0


@pytest.mark.parametrize("ops", [0, 1, 2])
def test_a_stretch_may_be_suspended_behind_each_op_and_ops_run_in_order(ops):
    executor = started(1)
    started(2, executor)
    for run in (1, 2):
        executor.deliver(run, (0, 0, "planner"), X)
        executor.deliver(run, (1, 0, "peer"), X)
    steps, sent = [], []
    while (step := executor.next_step()) is not None:
        steps.append((step.run_id, step.place))
        outgoing = step.run(ops=ops)
        if outgoing is not None:
            sent.append(np.array(outgoing.array))
    # The second op waits for less than the first, and the third for both: none of them are a stretch.
    assert steps == [(run, place) for run in (1, 2) for place in (2, 3, 4, 5)]
    np.testing.assert_array_equal(sent, [4 * X] * 2)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_tensor_that_a_stretch_receives_starts_a_stretch_of_the_next_block_once(order):
    b = ProgramBuilder("me")
    x = b.recv((2, 2), "planner", 0)
    twice = b.compute("add", (x, x), (2, 2), bias=False)
    y = b.recv((2, 2), "peer", 1)
    b.send(b.compute("add", (twice, y), (2, 2), bias=False), ("peer",), 2)
    b.send(b.compute("add", (y, y), (2, 2), bias=False), ("planner",), 4)
    program = b.build()
    ops = list(program.ops)
    ops[4], ops[5] = ops[4]._replace(route="mesh"), ops[5]._replace(node=3)
    executor, sent = Executor(), []
    executor.admit(1, bind(replace(program, ops=tuple(ops), blocks=(0, 3)), {}, Workers(1)))
    exchanges = [((0, 0, "planner"), X), ((1, 0, "peer"), 10 * X)]
    for key, array in [exchanges[n] for n in order]:
        executor.deliver(1, key, array)
        while (step := executor.next_step()) is not None:
            if (outgoing := step.run()) is not None:
                sent.append((outgoing.op.to, outgoing.array.tolist()))
    assert sent == [(("peer",), (12 * X).tolist()), (("planner",), (20 * X).tolist())]
    assert executor.finish_if_done(1)


def test_dropping_a_request_gives_its_buffers_back():
    executor = started()
    executor.deliver(1, (0, 0, "planner"), X)
    executor.next_step().run()
    executor.drop(1)
    assert executor.next_step() is None
    assert executor.cached_bytes() == X.nbytes
    executor.drop(1)


def test_arrays_of_another_layout_and_repeated_runs_are_refused():
    executor = started()
    for wrong in (X[:1], X.astype(np.float16), X.view(np.int32), X.T):
        with pytest.raises(ValueError):
            executor.deliver(1, (1, 0, "peer"), wrong)
    with pytest.raises(ValueError):
        started(1, executor)


def test_a_weight_that_is_not_resident_is_an_error():
    spec = FAMILIES["bert-embedding"]
    parts = device_program(spec, plan(spec, ("single", {}), (1.0,)), request(spec, (3,))[0], "d0")
    with pytest.raises(KeyError):
        bind(parts, {}, Workers(1))


@pytest.mark.parametrize(("family", "threads"), [(family, 1 + n % 2) for n, family in enumerate(FAMILIES)])
def test_run_local_equals_the_reference(family, threads):
    spec = FAMILIES[family]
    shape, inputs = request(spec, (7, 5))
    alone = device_program(spec, plan(spec, ("single", {}), (1.0,)), shape, "d0")
    workers = Workers(threads)
    try:
        got = run_local(alone, tensors(spec), inputs, workers)
    finally:
        workers.close()
    np.testing.assert_allclose(got, models.reference(spec, tensors(spec), inputs, shape)[1], atol=TOLERANCE)


@pytest.mark.parametrize("wrong", ["a peer", "dtype", "length", "strides"])
def test_run_local_refuses_a_program_with_peers_and_an_input_that_it_does_not_expect(wrong):
    spec = FAMILIES["bert-embedding"]
    shape, inputs = request(spec, (7, 5))
    chosen = plan(spec, ("block", {}), (1.0, 1.0)) if wrong == "a peer" else plan(spec, ("single", {}), (1.0,))
    spoilt = {"dtype": inputs.astype(np.float64), "length": inputs[:-1], "strides": np.stack([inputs, inputs], 1)[:, 0]}
    with pytest.raises(ValueError):
        run_local(device_program(spec, chosen, shape, "d0"), tensors(spec), spoilt.get(wrong, inputs))
