"""Several requests on the virtual clock: latency and throughput, and micro-batches that overlap."""

from __future__ import annotations

import pytest
from sites import FAMILIES, METHODS, plan, request

from hepti_mqtt.cost.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Load, Naming, Request, RunTimes, load_of, play, simulate, under_load
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.planner import Question, price

NAMING = Naming("home", "m")
SPEC = FAMILIES["vit-classifier"]
SHAPE = request(SPEC, (17,))[0]


def site(devices):
    """Return equal devices whose work takes much longer than their exchanges."""
    profiles = {
        f"d{i}": DeviceProfile(f"d{i}", (Curve(32, 32, ((1, 1e-3), (20, 2e-2))),), 1e6, 1e8) for i in range(devices)
    }
    return Cluster(profiles, dict.fromkeys(profiles, Link()))


def asked(name, devices=2, shape=SHAPE, options=None):
    return Request(shape, programs(SPEC, plan(SPEC, (name, options or {}), (1.0,) * devices), shape))


def alone(wanted, cluster):
    return simulate(NAMING, SPEC, wanted.shape, wanted.programs, cluster)


def loaded(wanted, cluster, in_flight=2):
    return under_load(NAMING, SPEC, wanted, cluster, in_flight, 6 * in_flight)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join([m[0], *m[1].values()]))
def test_requests_that_do_not_overlap_are_requests_alone(method):
    devices = 1 if method[0] == "single" else 2
    wanted, cluster = asked(method[0], devices, options=method[1]), site(devices)
    one = alone(wanted, cluster)
    times = [3 * n * one.seconds for n in range(3)]
    several = play(NAMING, SPEC, [wanted._replace(asked_s=at) for at in times], cluster, in_flight=2)
    assert [run.latency_s for run in several.runs] == pytest.approx([one.seconds] * 3)
    assert several.nbytes == 3 * one.nbytes
    for name, use in several.devices.items():
        assert use.sent_bytes == 3 * one.devices[name].sent_bytes
        assert use.flops == pytest.approx(3 * one.devices[name].flops)


def test_a_pipeline_takes_the_next_request_while_the_last_one_is_on_its_way():
    cluster, wanted = site(3), asked("pipeline", 3)  # three layers, one each
    one = alone(wanted, cluster).seconds
    assert loaded(wanted, cluster, in_flight=2).requests_per_s > 1.5 / one
    full = loaded(wanted, cluster, in_flight=3)
    assert full.requests_per_s > 2.0 / one  # not 3: the first stage has stem and task too
    assert full.latency_s >= one
    by_turns = loaded(wanted, cluster, in_flight=1).requests_per_s
    assert 0.999 / one < by_turns < 1 / one, "the next one waits for the reports of the last, an answer does not"


def test_one_device_gains_nothing_but_the_time_of_its_frames():
    cluster, wanted = site(1), asked("single", 1)
    one = alone(wanted, cluster).seconds
    found = loaded(wanted, cluster)
    assert 1.0 <= found.requests_per_s * one < 1.1
    assert found.latency_s == pytest.approx(2 * one, rel=0.1)


def test_the_sequences_of_a_request_are_micro_batches():
    shape = PackedTokens((17,) * 4)
    wanted, cluster = asked("pipeline", 3, shape), site(3)
    events = simulate(NAMING, SPEC, shape, wanted.programs, cluster, record=True).events
    busy = {d: [(e.start, e.stop) for e in events if e.device == d and e.lane == "compute"] for d in wanted.programs}
    both = sum(max(min(stop, end) - max(start, begin), 0.0) for start, stop in busy["d0"] for begin, end in busy["d1"])
    second = sum(stop - start for start, stop in busy["d1"])
    assert both > 0.5 * second, "the second stage has one sequence while the first has the next"
    one, four = alone(asked("pipeline", 3), cluster).seconds, alone(wanted, cluster).seconds
    assert four < 0.7 * 4 * one
    found = loaded(wanted, cluster)
    assert found.sequences_per_s == pytest.approx(4 * found.requests_per_s)


def test_never_more_in_flight_than_the_coordinator_lets_run():
    wanted, cluster = asked("pipeline", 3), site(3)
    runs = play(NAMING, SPEC, [wanted._replace(asked_s=0.0)] * 7, cluster, in_flight=2).runs
    for run in runs:
        others = [r for r in runs if r.dispatched_s <= run.dispatched_s < r.answered_s]
        assert len(others) <= 2
    assert [r.dispatched_s for r in runs] == sorted(r.dispatched_s for r in runs)
    assert runs[-1].latency_s > 3 * runs[0].latency_s, "who waits for room waits"


def test_the_price_carries_throughput_of_whole_programs_when_it_is_asked():
    cluster = site(3)
    chosen = plan(SPEC, ("row", {"variant": "kv"}), (1.0,) * 3)
    question = Question(NAMING, SPEC, cluster, SHAPE, Epoch(1, 1), in_flight=2, requests=8)
    assert price(question, chosen).load is None, "the search prices latency alone"
    assert price(question, chosen, full=True).load == under_load(
        NAMING, SPEC, Request(SHAPE, programs(SPEC, chosen, SHAPE)), cluster, 2, 8
    )
    assert price(Question(NAMING, SPEC, cluster, SHAPE, Epoch(1, 1)), chosen, full=True).load is None


def test_the_steady_state_is_whole_rounds_between_the_first_and_the_last():
    # Bunches of two, 1 s apart; the first and the last two are not counted, nor is the odd one.
    ends = [10.0, 10.1, 11.0, 11.1, 12.0, 12.1, 13.0, 13.1, 20.0]
    found = load_of([RunTimes(0.0, 0.0, end, 3) for end in ends], in_flight=2)
    assert found.requests_per_s == pytest.approx(4 / (13.0 - 11.0))
    assert found.sequences_per_s == pytest.approx(3 * found.requests_per_s)
    assert (found.latency_s, found.longest_s) == (12.0, 20.0)


def test_too_few_requests_count_from_the_first_question_on():
    found = load_of([RunTimes(1.0, 1.0, 2.0), RunTimes(1.0, 1.0, 3.0)], in_flight=2)
    assert found.requests_per_s == pytest.approx(2 / 2.0)
    with pytest.raises(ValueError, match="no request"):
        load_of([], 2)


def test_people_and_programs_can_read_it():
    found = Load(12, 2, 0.59327, 2.37308, 3.3712, 4.0)
    assert found.text() == (
        "throughput 0.593 requests/s (2.37 sequences/s) with 2 in flight; "
        "latency then 3371.2 ms, the longest of 12 4000.0 ms"
    )
    assert found.to_dict()["longest_ms"] == 4000.0
