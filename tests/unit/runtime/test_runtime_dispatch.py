"""Queued requests: shared runs, turns of clients, limits, failures, and assignment to replicas."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_site import SPEC, Site, everyone, settled
from sites import FAMILIES, MODEL, request

from hepti_mqtt.core.errors import DeadlineError, OverloadedError, RemoteError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.schedule import route_to_replicas
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import decode_work
from hepti_mqtt.runtime.coordinator import admission as module
from hepti_mqtt.runtime.coordinator.admission import MAX_QUEUED, MAX_QUEUED_PER_CLIENT
from hepti_mqtt.runtime.coordinator.batches import Batch, concatenate, split_into_micro_batches
from hepti_mqtt.runtime.coordinator.dispatch import Assignment, ReplicaLoad, next_assignment
from hepti_mqtt.runtime.coordinator.fair_queue import Batching, FairQueue
from hepti_mqtt.runtime.coordinator.requests import Request, RequestKey, WorkItem
from hepti_mqtt.runtime.coordinator.run_tracker import MAX_ATTEMPTS

TOGETHER = Batching(16)


def busy(batching: Batching = TOGETHER, **more: object) -> Site:
    """Return a site of one device that computes its first run."""
    site = settled("a", in_flight=1, batching=batching, decider=everyone, **more)
    site.submit("first", 3)
    assert lengths(site, 1) == (3,)
    return site


def queued(site: Site, *queue: int) -> Site:
    """Queue requests r0, r1, ... of these lengths, and end the first run."""
    for i, length in enumerate(queue):
        site.submit(f"r{i}", length)
    site.answer(1)
    return site


def lengths(site: Site, run_id: int) -> tuple[int, ...]:
    """Return the lengths of the sequences of a run."""
    return decode_work(site.work[run_id])[0].sizes


def test_queued_requests_share_a_run_sorted_by_length_and_have_their_own_answers() -> None:
    site = queued(busy(), 9, 4, 7, 4)
    assert lengths(site, 2) == (4, 4, 7, 9)
    site.answer(2)
    assert {n: a.request.output()[:, 0].tolist() for n, a in site.answers.items()} == {
        "first": [3], "r0": [9], "r1": [4], "r2": [7], "r3": [4],
    }  # fmt: skip
    (stats,) = site.answers["r0"].stats
    assert (stats.requests, stats.shape.lengths) == (4, (4, 4, 7, 9))
    assert site.answers["first"].stats[0].requests == 1


def test_equal_requests_have_few_shapes() -> None:
    shapes = set()
    for count in (1, 2, 3, 7, 12, 39):
        site = queued(busy(), *[4] * count)
        while len(site.answers) <= count:
            shapes.add(lengths(site, max(site.work)))
            site.answer(max(site.work))
    assert {len(shape) for shape in shapes} == {1, 2, 4, 8, 16}


def test_a_run_has_no_more_tokens_than_the_longest_request() -> None:
    site = queued(busy(), 30, 30, 30, 30, 4)
    assert lengths(site, 2) == (30, 30), "at most 64 tokens, and a power of two of requests"


def test_batches_of_one_request_run_apart() -> None:
    site = busy()
    site.submit("long", 4, 5, 6)
    site.submit("short", 7)
    for run_id in (1, 2, 3, 4):
        site.answer(run_id)
    assert [lengths(site, run_id) for run_id in (2, 3, 4)] == [(4, 7), (5,), (6,)]
    assert site.answers["long"].request.output()[:, 0].tolist() == [4, 5, 6]
    assert [s.requests for s in site.answers["long"].stats] == [2, 1, 1]


def test_turns_are_by_tokens() -> None:
    """Three clients with requests of different lengths are served as many tokens as each other."""
    site = busy(Batching(1))
    wanted = {"long": (32, 8), "short": (4, 64), "middle": (8, 32)}
    for client, (length, count) in wanted.items():
        for i in range(count):
            site.submit(f"{client}{i}", length, client=client)
    had = dict.fromkeys(wanted, 0)
    site.answer(1)
    for _ in range(70):
        (length,) = lengths(site, max(site.work))
        had[next(c for c, (n, _) in wanted.items() if n == length)] += length
        assert max(had.values()) - min(had.values()) <= 32, had
        site.answer(max(site.work))


def test_idle_clients_do_not_save_up_turns() -> None:
    site = busy(Batching(1))
    for i in range(20):
        site.submit(f"a{i}", 8, client="a")
    for _ in range(10):
        site.answer(max(site.work))
    for i in range(20):
        site.submit(f"b{i}", 7, client="b")
    ran = []
    for _ in range(8):
        site.answer(max(site.work))
        ran += lengths(site, max(site.work))
    assert 3 <= ran.count(8) <= 5


def test_the_queue_is_bounded_for_a_client_and_for_all() -> None:
    site = busy()
    for i in range(MAX_QUEUED_PER_CLIENT + 1):
        site.submit(f"a{i}", 4, client="a")
    assert list(site.errors) == [f"a{MAX_QUEUED_PER_CLIENT}"]
    site.submit("b", 4, client="b")
    assert "b" not in site.errors
    for i in range(MAX_QUEUED):
        site.submit(f"c{i}", 4, client=f"c{i // MAX_QUEUED_PER_CLIENT}")
    refused = [e for e in site.errors.values() if isinstance(e, OverloadedError)]
    assert len(refused) == 1 + MAX_QUEUED_PER_CLIENT + 1


def test_the_queue_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    site = busy()
    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 100)
    for name, length in (("r0", 20), ("r1", 8), ("r2", 5)):
        site.submit(name, length, client=f"c-{name}")
    assert {name: type(error) for name, error in site.errors.items()} == {"r1": OverloadedError}


# -- errors of a run --------------------------------------------------------------------------------------------------


def test_the_requests_of_a_failed_run_are_retried_alone_so_that_only_the_bad_one_ends() -> None:
    site = queued(busy(), 4, 5, 6, 7)
    site.run_failed("a", 2, "device")
    assert not site.errors
    failed = 0
    for run_id in range(3, 8):
        assert bool(site.errors) == (failed == 2)
        assert len(lengths(site, run_id)) == 1
        is_bad = lengths(site, run_id) == (6,)
        site.run_failed("a", run_id, "device") if is_bad else site.answer(run_id)
        failed += is_bad
    assert list(site.errors) == ["r2"]
    assert set(site.answers) == {"first", "r0", "r1", "r3"}


def test_a_lost_run_is_retried_and_the_requests_of_a_run_that_is_lost_twice_alone() -> None:
    site = queued(busy(), 4, 5, 6, 7)
    site.run_failed("a", 2, "wire")
    assert lengths(site, 3) == (4, 5, 6, 7)
    site.run_failed("a", 3, "wire")
    while len(site.answers) + len(site.errors) < 5:
        run_id = max(site.work)
        assert len(lengths(site, run_id)) == 1
        site.run_failed("a", run_id, "wire") if lengths(site, run_id) == (6,) else site.answer(run_id)
    assert {name: type(error) for name, error in site.errors.items()} == {"r2": RemoteError}
    assert max(site.work) == 3 + 3 + MAX_ATTEMPTS - 2


def test_a_deadline_ends_only_its_own_request() -> None:
    site = busy()
    for name, within in (("short", 1.0), ("long", 30.0)):
        site.submit(name, 4, within=within)
    site.answer(1)
    site.tick(1.5)
    assert isinstance(site.errors["short"], DeadlineError)
    assert not any(isinstance(m, messages.Cancel) for _, m in site.sent), "the other request waits for the run"
    site.answer(2)
    assert site.answers["long"].request.output()[:, 0].tolist() == [4]


@pytest.mark.parametrize("rows", [1, 3])
def test_after_an_output_of_another_size_requests_run_alone_for_a_few_attempts(rows: int) -> None:
    """A part may be forged."""
    site = queued(busy(), 4, 4)
    misfit(site, 2, rows)
    assert not site.errors
    site.answer(3)
    assert set(site.answers) == {"first", "r0"}
    for run_id in range(4, 4 + MAX_ATTEMPTS):
        assert not site.errors
        assert lengths(site, run_id) == (4,)
        misfit(site, run_id, rows)
    assert isinstance(site.errors["r1"], RemoteError)


def misfit(site: Site, run_id: int, rows: int) -> None:
    """Let the device answer with an output of a wrong shape."""
    body = np.zeros((rows, SPEC.hidden + 1), np.float32)
    site.hear(site.part(run_id, "a", body), site.done(run_id, "a", 1))


# -- delay ------------------------------------------------------------------------------------------------------------


def test_requests_wait_for_others_at_most_for_the_delay_and_leave_time_until_the_deadline() -> None:
    site = settled("a", batching=Batching(4, 0.05), decider=everyone)
    site.submit("r0", 4)
    assert not site.work
    assert site.session.due_s == pytest.approx(site.now + 0.05)
    site.tick(0.02)
    site.submit("r1", 5)
    site.tick(0.04)
    assert lengths(site, 1) == (4, 5)
    assert site.session.due_s == float("inf")
    site.answer(1)
    for i in range(4):
        site.submit(f"full{i}", 4)
    site.submit("long", 64)
    assert [lengths(site, run_id) for run_id in (2, 3)] == [(4, 4, 4, 4), (64,)], "full runs do not wait"
    site = settled("a", batching=Batching(4, 10.0), decider=everyone)
    site.submit("r", 4, within=12.0)
    assert site.session.due_s == pytest.approx(site.now + 2.0)


# -- replicas ---------------------------------------------------------------------------------------------------------


def test_each_request_goes_to_the_replica_that_finishes_it_first():
    assert list(route_to_replicas(10.0, [(9.0, 4.0), (12.0, 1.0)], [1.0])) == [1]
    assert list(route_to_replicas(10.0, [(9.0, 2.0), (12.0, 1.0)], [1.0])) == [0]
    assert list(route_to_replicas(10.0, [(0.0, 1.0), (0.0, 1.0)], [1.0])) == [0]
    unequal = [(0.0, 0.95), (0.0, 2.8), (0.0, 5.7)]
    assert list(route_to_replicas(0.0, unequal, [1.0] * 8)) == [0, 0, 1, 0, 0, 0, 1, 0]
    assert list(route_to_replicas(0.0, unequal, [1.0] * 9))[-1] == 2
    assert list(route_to_replicas(0.0, unequal, [4.0, 1.0])) == [0, 1]


def test_requests_wait_for_a_busy_replica_that_finishes_them_sooner():
    def plan(name, seconds):
        return Plan(MODEL, PlanVersion(1, 1), "single", (name,), name, predicted_s=seconds, predicted_tokens=128)

    def loads(fast_until_s, has_room):
        return [
            ReplicaLoad(plan("fast", 1.0), fast_until_s, 1 / 128, has_room),
            ReplicaLoad(plan("slow", 6.0), 0.0, 6 / 128, True),
        ]

    shape, inputs = request(SPEC, (12,))  # takes as long as 64 tokens, half of the plan's shape
    queue = FairQueue()
    for number in range(8):
        waiting = Request(RequestKey(MODEL, "c", f"r{number}"), (Batch(shape, inputs),), None, None)
        queue.append([WorkItem(waiting, 0)])
        hand = next_assignment(0.0, loads(2.0, False), queue)
        assert hand == (None if number < 2 else Assignment(loads(0, True)[1].plan, 1)), number
    assert next_assignment(0.0, loads(0.0, True), queue) == Assignment(loads(0, True)[0].plan, 7)


def test_a_batch_is_cut_into_micro_batches_in_its_order():
    spec = FAMILIES["bert-mask"]
    shape, inputs = request(spec, (40, 30, 20, 50, 3, 2))
    parts = split_into_micro_batches([Batch(shape, inputs)])
    assert [part.shape.lengths for part in parts] == [(40, 30), (20, 50, 3, 2)]
    assert all(len(part.inputs) == part.shape.tokens for part in parts)
    again = concatenate(parts)
    assert again.shape == shape
    assert again.inputs.tolist() == inputs.tolist()
