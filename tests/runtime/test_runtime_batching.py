"""Requests that wait run together: each gets its own answer, error and turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_site import SPEC, Site, everyone
from sites import EVERY_FAMILY, FAMILIES, METHODS, TOLERANCE, request, tensors
from sites import everyone as divided
from swarm import Swarm, plan_of

from hepti_mqtt import models
from hepti_mqtt.errors import DeadlineError, OverloadedError, RemoteError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import decode_work
from hepti_mqtt.runtime.coordinator import interface, scheduler
from hepti_mqtt.runtime.coordinator.models import URGENT
from hepti_mqtt.runtime.coordinator.requests import Batching, Chunk, Pins, packed, parted
from hepti_mqtt.runtime.coordinator.scheduler import ATTEMPTS, OVERDUE_S, QUEUE, QUEUE_ALL
from hepti_mqtt.spec import Spec

TOGETHER = Batching(16)
Method = tuple[str, Mapping[str, str]]


def busy(batching: Batching = TOGETHER, **more: object) -> Site:
    """Return a site of one device whose one run, the first, is under way."""
    site = Site(in_flight=1, batching=batching, decider=everyone, **more)
    site.join("a")
    site.settle()
    site.submit("first", 3)
    assert lengths(site, 1) == (3,)
    return site


def lengths(site: Site, admission: int) -> tuple[int, ...]:
    """Return the lengths of the sequences of a run."""
    return decode_work(site.work[admission])[0].sizes


def fail(site: Site, admission: int, code: str) -> None:
    """Let the device say that a run has failed."""
    epoch = site.work[admission].epoch
    site.event(interface.UpMessage("a", messages.RequestFailed("m", epoch, admission, code, "no")))


def running(spec: Spec, method: Method, devices: int, **network: float) -> Swarm:
    """Return a site of real sessions with an active plan of a method."""
    hosts = {f"d{i}": (1e9, 1 << 30) for i in range(devices)}
    swarm = Swarm(spec, tensors(spec), hosts, decider=divided(method), batching=Batching(), **network)
    swarm.run(30, until=lambda: plan_of(swarm) is not None)
    return swarm


def together_at_most(answers: Mapping[object, list[Any]]) -> int:
    """Return how many requests the largest run was of."""
    return max(stats.requests for told in answers.values() for stats in told[0][1])


def test_what_waits_runs_together_sorted_by_length_and_each_has_its_own_answer() -> None:
    site = busy()
    for i, length in enumerate((9, 4, 7, 4)):
        site.submit(f"r{i}", length)
    site.answer(1)
    assert lengths(site, 2) == (4, 4, 7, 9)
    site.answer(2)
    assert {n: a.job.output()[:, 0].tolist() for n, a in site.answers.items()} == {
        "first": [3], "r0": [9], "r1": [4], "r2": [7], "r3": [4],
    }  # fmt: skip
    (stats,) = site.answers["r0"].stats
    assert (stats.requests, stats.shape.lengths) == (4, (4, 4, 7, 9))
    assert site.answers["first"].stats[0].requests == 1


def test_equal_requests_make_few_shapes_however_many_wait() -> None:
    shapes = set()
    for count in range(1, 40):
        site = busy()
        for i in range(count):
            site.submit(f"r{i}", 4)
        while len(site.answers) <= count:
            shapes.add(lengths(site, max(site.work)))
            site.answer(max(site.work))
    assert {len(shape) for shape in shapes} == {1, 2, 4, 8, 16}


def test_a_run_holds_no_more_tokens_than_the_longest_request() -> None:
    site = busy()
    for i in range(4):
        site.submit(f"r{i}", 30)
    site.submit("short", 4)
    site.answer(1)
    assert lengths(site, 2) == (30, 30), "64 at the most, and a power of two of requests"


def test_chunks_of_one_request_run_apart_beside_those_of_others() -> None:
    site = busy()
    site.submit("long", 4, 5, 6)
    site.submit("short", 7)
    for admission in (1, 2, 3, 4):
        site.answer(admission)
    assert [lengths(site, admission) for admission in (2, 3, 4)] == [(4, 7), (5,), (6,)]
    assert site.answers["long"].job.output()[:, 0].tolist() == [4, 5, 6]
    assert [s.requests for s in site.answers["long"].stats] == [2, 1, 1]


def test_a_client_that_sends_much_does_not_keep_others_waiting() -> None:
    site = busy(Batching(4))
    for i in range(40):
        site.submit(f"many{i}", 8, client="many")
    site.submit("one", 5, client="one")
    site.answer(1)
    assert 5 in lengths(site, 2)


def test_turns_are_by_tokens() -> None:
    """Three clients, one with long requests: until all is done each has had as many tokens as the others."""
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


def test_a_client_that_was_away_saves_no_turns_up() -> None:
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
    assert 3 <= ran.count(8) <= 5, "by turns, not first what the other has had meanwhile"


def test_the_queue_is_bounded_for_a_client_and_for_all() -> None:
    site = busy()
    for i in range(QUEUE + 1):
        site.submit(f"a{i}", 4, client="a")
    assert list(site.errors) == [f"a{QUEUE}"]
    site.submit("b", 4, client="b")
    assert "b" not in site.errors
    for i in range(QUEUE_ALL):
        site.submit(f"c{i}", 4, client=f"c{i // QUEUE}")
    refused = [e for e in site.errors.values() if isinstance(e, OverloadedError)]
    assert len(refused) == 1 + QUEUE + 1


def test_the_queue_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    site = busy()
    monkeypatch.setattr(scheduler, "QUEUE_BYTES", 100)
    site.submit("r0", 20, client="a")
    site.submit("r1", 8, client="b")
    site.submit("r2", 5, client="c")
    assert list(site.errors) == ["r1"]
    assert "80 bytes" in str(site.errors["r1"])


def test_what_asks_for_something_else_runs_by_itself() -> None:
    swarm = running(SPEC, ("single", {}), 1)
    asked = {f"{want}{i}": request(SPEC, (5, 3), want, seed=i) for i in range(4) for want in ("task", "hidden")}
    for name, (shape, inputs) in asked.items():
        pins = Pins(storage="w8a8") if name == "task2" else None
        swarm.submit(name, shape, inputs, pins=pins)
    swarm.run(60, until=lambda: len(swarm.answers) == len(asked))
    for name, (shape, inputs) in asked.items():
        output, (stats,) = swarm.answers[name][0]
        wanted = models.reference(SPEC, swarm.tensors, inputs, shape)[1]
        assert output.shape == wanted.shape
        np.testing.assert_allclose(output, wanted, atol=0.05 if name == "task2" else TOLERANCE)
        assert stats.plan.storage == ("w8a8" if name == "task2" else "f32")
    assert together_at_most(swarm.answers) > 1


# -- errors of a run --------------------------------------------------------------------------------------------------


def test_a_run_that_fails_runs_again_one_by_one_so_that_only_the_bad_request_ends() -> None:
    site = busy()
    for i in range(4):
        site.submit(f"r{i}", 4 + i)
    site.answer(1)
    fail(site, 2, "device")
    assert not site.errors
    failed = 0
    for admission in range(3, 8):
        assert bool(site.errors) == (failed == 2), "it is tried once more by itself"
        assert len(lengths(site, admission)) == 1
        is_bad = lengths(site, admission) == (6,)
        fail(site, admission, "device") if is_bad else site.answer(admission)
        failed += is_bad
    assert list(site.errors) == ["r2"]
    assert set(site.answers) == {"first", "r0", "r1", "r3"}


def test_a_run_that_is_lost_is_run_again_and_one_that_is_lost_often_spoils_nobody_elses() -> None:
    site = busy()
    for i in range(4):
        site.submit(f"r{i}", 4 + i)
    site.answer(1)
    fail(site, 2, "wire")
    assert lengths(site, 3) == (4, 5, 6, 7), "devices come and go: at first all of it again"
    fail(site, 3, "wire")
    while len(site.answers) + len(site.errors) < 5:
        admission = max(site.work)
        assert len(lengths(site, admission)) == 1
        fail(site, admission, "wire") if lengths(site, admission) == (6,) else site.answer(admission)
    assert list(site.errors) == ["r2"]
    assert str(ATTEMPTS) in str(site.errors["r2"])


def test_an_overdue_run_is_issued_again_as_a_whole() -> None:
    site = busy()
    for i in range(2):
        site.submit(f"r{i}", 4)
    site.answer(1)
    for _ in range(int(OVERDUE_S) + 2):
        site.tick(1)
    site.ready()
    assert lengths(site, 3) == (4, 4)
    site.answer(2)
    assert len(site.answers) == 1, "the lost run's late answer"
    site.answer(3)
    assert len(site.answers) == 3


def test_a_deadline_ends_its_request_alone() -> None:
    site = busy()
    site.submit("short", 4, within=1.0)
    site.submit("long", 5, within=30.0)
    site.answer(1)
    site.tick(1.5)
    assert isinstance(site.errors["short"], DeadlineError)
    assert not any(isinstance(m, messages.Cancel) for _, m in site.told), "somebody waits for the run"
    site.answer(2)
    assert site.answers["long"].job.output()[:, 0].tolist() == [5]


def test_a_run_that_nobody_waits_for_is_cancelled() -> None:
    site = busy()
    for i in range(2):
        site.submit(f"r{i}", 4, within=1.0)
    site.answer(1)
    site.tick(1.5)
    assert [m.admission for _, m in site.told if isinstance(m, messages.Cancel)] == [2]
    assert len(site.errors) == 2


def test_the_same_request_again_is_computed_once_in_its_run() -> None:
    site = busy()
    site.submit("r", 4)
    site.submit("r", 4)
    site.answer(1)
    assert lengths(site, 2) == (4,)
    site.submit("r", 4)
    site.answer(2)
    assert set(site.answers) == {"first", "r"}


@pytest.mark.parametrize("rows", [1, 3])
def test_after_an_output_of_another_size_each_runs_by_itself_until_it_has_failed_too_often(rows: int) -> None:
    """One of its parts may be forged."""
    site = busy()
    for i in range(2):
        site.submit(f"r{i}", 4)
    site.answer(1)
    misfit(site, 2, rows)
    assert not site.errors
    site.answer(3)
    assert set(site.answers) == {"first", "r0"}
    for admission in range(4, 4 + ATTEMPTS):
        assert not site.errors
        assert lengths(site, admission) == (4,)
        misfit(site, admission, rows)
    assert isinstance(site.errors["r1"], RemoteError)


def misfit(site: Site, admission: int, rows: int) -> None:
    """Let the device answer with so many rows, which nobody asked for."""
    frame, output = site.work[admission], np.zeros((rows, SPEC.hidden + 1), np.float32)
    site.event(
        interface.UpFrame("a", replace(frame, kind="output", source="a", dtype="f32", shape=output.shape, body=output))
    )
    done = replace(frame, kind="done", source="a", dtype="u8", shape=(0,), numbers=(1, 1, 1, 1), body=b"")
    site.event(interface.UpFrame("a", done))


# -- delay ------------------------------------------------------------------------------------------------------------


def test_with_a_delay_requests_wait_for_others_but_never_longer() -> None:
    site = Site(batching=Batching(4, 0.05), decider=everyone)
    site.join("a")
    site.settle()
    site.submit("r0", 4)
    assert not site.work
    assert site.session.due_s == pytest.approx(site.now + 0.05)
    site.tick(0.02)
    site.submit("r1", 5)
    site.tick(0.04)
    assert lengths(site, 1) == (4, 5)
    assert site.session.due_s == float("inf")


def test_a_full_run_does_not_wait() -> None:
    site = Site(batching=Batching(4, 0.05), decider=everyone)
    site.join("a")
    site.settle()
    for i in range(4):
        site.submit(f"r{i}", 4)
    assert lengths(site, 1) == (4, 4, 4, 4)
    site.submit("long", 64)
    assert lengths(site, 2) == (64,)


def test_a_delay_leaves_time_until_the_deadline() -> None:
    site = Site(batching=Batching(4, 10.0), decider=everyone)
    site.join("a")
    site.settle()
    site.submit("r", 4, within=12.0)
    assert site.session.due_s == pytest.approx(site.now + 2.0)


# -- what devices build ahead -----------------------------------------------------------------------------------------


def test_devices_build_the_programs_of_the_runs_that_wait() -> None:
    site = Site(in_flight=1, batching=TOGETHER, decider=everyone)
    for i in range(21):
        site.submit(f"r{i}", 4)
    site.join("a")
    site.tick(1.1)
    (prepare,) = site.prepares().values()
    assert [len(shape.sizes) for shape in prepare.shapes[:3]] == [16, 4, 1]
    assert prepare.needed == URGENT, "the last one need not hold up the first"


# -- any mix ----------------------------------------------------------------------------------------------------------


PACKED = [name for name in EVERY_FAMILY if name not in {"tiny-gpt2", "tiny-convnet"}]  # which hold one each


@pytest.mark.parametrize("family", PACKED)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_the_answer_of_a_batch_is_that_of_each_of_its_requests(family: str, data: st.DataObject) -> None:
    spec = EVERY_FAMILY[family]
    weights = tensors(spec)
    want = data.draw(st.sampled_from(["task", "hidden"]))
    batches = data.draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=5))
    chunks = [Chunk(*request(spec, batch, want, seed=i)) for i, batch in enumerate(batches)]
    whole = packed(chunks)
    output = models.reference(spec, weights, whole.inputs, whole.shape)[1]
    assert output.shape == spec.output_shape(whole.shape)
    for chunk, mine in zip(chunks, parted(spec, chunks, output), strict=True):
        np.testing.assert_allclose(mine, models.reference(spec, weights, chunk.inputs, chunk.shape)[1], atol=TOLERANCE)


CONTRACT = [(f, m) for i, f in enumerate(FAMILIES) for j, m in enumerate(METHODS) if (i + j) % len(FAMILIES) == 0]


@pytest.mark.parametrize(
    ("family", "method"), CONTRACT, ids=[f"{f}-{'-'.join([m[0], *m[1].values()])}" for f, m in CONTRACT]
)
def test_any_mix_of_requests_gives_each_its_own_answer_under_every_method(family: str, method: Method) -> None:
    """Over a network with duplicates and delays; batches and single runs come under the same plan."""
    spec = FAMILIES[family]
    swarm = running(spec, method, 1 if method[0] == "single" else 3, duplicates=0.1, jitter_s=0.002)
    rng = np.random.default_rng(len(family))
    asked = {}
    for i in range(14):
        lengths = rng.integers(1, 8, rng.integers(1, 3) if spec.text is not None else 1).tolist()
        asked[f"r{i}"] = request(spec, lengths, ("task", "hidden")[int(i % 5 == 4)], seed=i)
        swarm.submit(f"r{i}", *asked[f"r{i}"])
    swarm.run(60, until=lambda: len(swarm.answers) == len(asked))
    assert not swarm.errors
    for name, (shape, inputs) in asked.items():
        ((output, _),) = swarm.answers[name]
        hidden, task = models.reference(spec, swarm.tensors, inputs, shape)
        np.testing.assert_allclose(output, hidden if shape.want == "hidden" else task, atol=TOLERANCE)
    if spec.text is not None:
        assert together_at_most(swarm.answers) > 1


def test_lost_devices_and_exchanges_cost_no_answer_of_a_batch() -> None:
    spec = FAMILIES["bert-embedding"]
    swarm = running(spec, ("row", {"variant": "kv"}), 3)
    asked = {f"r{i}": request(spec, (1 + i % 5,), seed=i) for i in range(20)}
    for name, (shape, inputs) in asked.items():
        swarm.submit(name, shape, inputs)
    swarm.run(0.01)
    swarm.kill("d1")
    swarm.run(90, until=lambda: len(swarm.answers) == len(asked))
    assert not swarm.errors
    for name, (shape, inputs) in asked.items():
        ((output, _),) = swarm.answers[name]
        np.testing.assert_allclose(output, models.reference(spec, swarm.tensors, inputs, shape)[1], atol=TOLERANCE)


# Under the other methods the place where rows are cut between devices decides the order of some sums.
SAME_BITS = ("single", "column", "block", "megatron-direct", "two_d-1", "galaxy-direct", "pipeline")
QUICK = ("single", "galaxy-direct")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, id=name, marks=[] if name in QUICK else pytest.mark.wide)
        for m in METHODS
        if (name := "-".join([m[0], *m[1].values()])) in SAME_BITS
    ],
)
def test_answers_of_a_batch_are_the_bits_of_single_runs(method: Method) -> None:
    spec = FAMILIES["bert-embedding"]
    answers = []
    for together in (True, False):
        swarm = running(spec, method, 1 if method[0] == "single" else 3)
        for i in range(12):
            shape, inputs = request(spec, (1 + i,), seed=i)
            swarm.submit(i, shape, inputs)
            if not together:
                swarm.run(30, until=lambda swarm=swarm, i=i: i in swarm.answers)
        swarm.run(30, until=lambda swarm=swarm: len(swarm.answers) == 12)
        answers.append(swarm.answers)
    assert together_at_most(answers[0]) > 1
    assert together_at_most(answers[1]) == 1
    assert all(np.array_equal(answers[0][i][0][0], answers[1][i][0][0]) for i in range(12))
