"""A short run of the schedule: nothing lost, nothing wrong, no repetition without a word."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from broker_kinds import needs_mosquitto, process_of
from faults_site import KINDS, Fault, kill_broker, schedule, wait_until_saved
from flat import MIB, Flat, Held
from site_load import RIGHT, Client, Outcome
from site_processes import PATIENCE_S, SITE, Site, User, poll
from site_run import MODEL, Report, Run, model_directory, run, silences, unexplained

from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.embedded_broker import start_broker

pytestmark = [needs_mosquitto]

UNMET = "no broker answers"
FROZEN_REQUESTS = 100  # more than may wait of one client else
FROZEN_S = (8.0, 180.0)  # with the time until it is noticed, more than heartbeats may be missed; more than keepalives
ENDS_S = 20.0  # without being killed; the figure that counts is printed, and in docs/reference/guarantees.md


@pytest.fixture
def site(tmp_path):
    with start_broker() as broker, Site(tmp_path, broker, {MODEL: model_directory(tmp_path, "tiny")}) as running:
        yield running


def start_planner(site):
    site.planner()
    poll(lambda: f"serves {MODEL}" in site.log("planner"), "the planner")


def test_what_a_broker_drops_that_was_killed_before_its_first_save_the_library_sends_again(site):
    start_planner(site)
    with Hepti.connect(site.url, site=SITE, client_id="library") as hepti:
        site.kill("planner")
        kill_broker(site.broker)
        (site.broker._directory / "mosquitto.db").unlink(missing_ok=True)
        site.broker.start()
        with User(site.url) as raw:
            assert not raw.is_read(MODEL, {"id": "dropped", "ids": [7, 8]}), "the broker says that nobody reads it"
            raw.read(raw.topics.request(MODEL, "library"))
            pending = hepti.submit(MODEL, request_id="early", ids=[7, 8], strategy="no-such-method")
            _, dropped = raw.answers.get(timeout=PATIENCE_S)
            assert dropped["id"] == "early", "the broker has it, and nobody else"
            site.planner()
            with pytest.raises(RequestError):
                pending.result(PATIENCE_S)


def test_whatever_is_lost_meanwhile_every_request_has_one_right_answer(tmp_path):
    report = run(Run(75.0, seed=3, every_s=(9.0, 12.0)), tmp_path, {MODEL: model_directory(tmp_path, "tiny")})
    assert len(report.faults) >= len(KINDS)
    assert report.good, str(report)
    for kind in report.clients:
        assert set(report.errors(kind)) <= {"overloaded"}, str(report)


def test_whatever_is_lost_meanwhile_streams_and_speech_end_rightly_or_with_an_error(tmp_path):
    served = {MODEL: model_directory(tmp_path, "tiny")}
    report = run(Run(90.0, seed=4, every_s=(9.0, 12.0), mixed=True), tmp_path, served)
    assert len(report.faults) >= len(KINDS)
    assert report.good, str(report)


@pytest.mark.nightly
def test_chats_that_take_over_each_other_s_caches_have_the_tokens_that_they_have_alone(tmp_path):
    report = run(Run(300.0, kinds=(), clients=0, chats=6), tmp_path, {})
    assert report.good, str(report)


@pytest.mark.nightly
def test_a_site_with_mixed_load_and_peers_that_stop_holds_no_more_in_the_end(tmp_path):
    # In a short run a plan that moves may be the first one for which a device loads MiniLM, or loads it again: 62 MiB.
    generous = Flat(96 * MIB, 0.3, 6, 3)
    stops = Run(40.0, 2, ("agent stopped",), (14.0, 16.0), clients=0, mixed=True, pinned=2, flat=generous)
    report = run(stops, tmp_path, {})
    assert report.good, str(report)


def held(*growth, most=float("inf")):
    """Return a process that had so many MiB, descriptors and threads in each quarter."""
    memory = Held(0, most * MIB)
    for quarter, (mib, descriptors, threads) in enumerate(growth):
        memory.samples += [(10.0 * quarter + n, int(mib * MIB), descriptors, threads) for n in range(10)]
    return memory


ERROR = Outcome(200.0, 201.0, "remote")


@pytest.mark.parametrize(
    ("what", "begun_s", "count"),
    [
        (Run(60.0, chats=6), [199.0], 1),
        (Run(60.0, flat=Flat()), [100.0], 1),
        (Run(60.0, flat=Flat()), [199.0], 0),
        (Run(60.0), [100.0], 0),
    ],
    ids=["chats", "flat, long after a fault", "flat, after a fault", "faults"],
)
def test_an_error_that_no_fault_explains_fails_a_run(what, begun_s, count):
    client = Client("c")
    client.outcomes += [ERROR, ERROR._replace(code=RIGHT)]
    errors = [outcome.text for outcome in unexplained(client, begun_s, what)]
    report = Report({"c": [client]}, [], {}, [], grown=errors)
    assert (len(errors), report.good) == (count, not count)


STEADY = (9, 9, 3)


@pytest.mark.parametrize(
    ("process", "wrong"),
    [
        (held((50, 5, 2), (100, 9, 3), (104, 9, 3), (105, 11, 4)), False),
        (held((100, 9, 3), (100, 9, 3), (104, 9, 3), (107, 9, 3)), True),
        (held(STEADY, STEADY, (9, 12, 3), (9, 12, 3)), True),
        (held(STEADY, STEADY, STEADY, (9, 9, 5)), True),
        (held(STEADY, (21, 9, 3), STEADY, STEADY, most=20), True),
    ],
    ids=["flat", "memory", "descriptors", "threads", "more than its budget"],
)
def test_a_process_is_flat_or_the_report_names_its_growth(process, wrong):
    assert len(list(process.wrong("p", Flat()))) == wrong


def test_what_comes_after_a_broker_kill_waits_for_the_planner(site):
    start_planner(site)
    wait_until_saved(site.broker)
    site.kill("planner")
    kill_broker(site.broker)
    site.broker.start()
    with User(site.url) as user:
        request = {"id": "early", "ids": [7, 8], "strategy": "no-such-method"}
        assert user.is_read(MODEL, request), "nobody is subscribed: the broker has forgotten the planner"
        site.planner()
        assert user.answers.get(timeout=PATIENCE_S)[1]["id"] == "early"


@contextmanager
def frozen_broker(broker):
    """Suspend a broker, as one whose host has lost power: its connections seem to stand."""
    process = process_of(broker)
    process.suspend()
    try:
        yield process
    finally:
        process.resume()


@pytest.mark.parametrize("away", ["ended", "silent", "never there"])
def test_who_is_told_to_end_while_the_broker_is_away_ends(site, away):
    if away == "never there":
        site.broker.stop()
        site.agent("a")  # a planner without a broker ends by itself
    else:
        site.planner()
        site.agent("a")
        poll(lambda: "a has joined" in site.log("planner"), "planner and agent")
        if away == "ended":
            site.broker.stop()
    with frozen_broker(site.broker) if away == "silent" else nullcontext():
        for name in site.running if away != "silent" else ():
            poll(lambda name=name: UNMET in site.log(name), f"{name} looks for its broker")
        for name in list(site.running):
            begun = time.monotonic()
            assert site.stop(name, ENDS_S) == 0, site.log(name)[-2000:]
            print(f"{name} ended {time.monotonic() - begun:.2f} s after SIGTERM")


@pytest.mark.parametrize("frozen_s", FROZEN_S)
def test_no_request_suffers_from_a_broker_that_is_frozen_and_comes_back(site, frozen_s):
    site.planner()
    site.agent("a")
    site.agent("b")
    with Hepti.connect(site.url, site=SITE) as hepti, User(site.url) as user:
        hepti.wait_ready(MODEL, PATIENCE_S)
        with frozen_broker(site.broker):
            pending = hepti.submit(MODEL, ids=[7, 8])
            for number in range(FROZEN_REQUESTS):
                user.send(MODEL, {"id": f"q{number}", "ids": [7, 8, number]})
            poll(lambda: "the broker is silent" in site.log("planner"), "the planner's notice")
            time.sleep(frozen_s)
        answered = set()
        while len(answered) < FROZEN_REQUESTS:
            _, answer = user.answers.get(timeout=PATIENCE_S)
            assert answer["ok"], answer
            answered.add(answer["id"])
        assert pending.result(PATIENCE_S).raw["ok"]


def test_a_schedule_is_known_by_its_seed_and_has_every_kind_in_turn():
    first, again, other = (list(schedule(seed, 200.0, (5.0, 9.0))) for seed in (1, 1, 2))
    assert first == again != other
    for start in range(0, len(first) - len(KINDS) + 1, len(KINDS)):
        assert {fault.kind for fault in first[start : start + len(KINDS)]} == set(KINDS)


def test_the_longest_silence_after_a_fault_is_its_own():
    faults = [Fault(0.0, "planner killed", "planner"), Fault(5.0, "broker killed", "broker")]
    answered = [*np.arange(0.0, 1.0, 0.1), *np.arange(3.0, 5.0, 0.1), *np.arange(6.0, 9.0, 0.1)]
    silence_of = silences(faults, [1.0, 5.0], {MODEL: answered})
    assert [gap.seconds for gap in silence_of["planner killed"]] == [pytest.approx(2.0)]
    assert [gap.seconds for gap in silence_of["broker killed"]] == [pytest.approx(1.0)]
