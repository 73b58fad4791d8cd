"""A short run of the schedule: nothing lost, nothing wrong, no repetition without a word."""

from __future__ import annotations

import json
import queue
import time
from pathlib import Path

import numpy as np
import pytest
from broker_kinds import needs_mosquitto
from faults_site import KINDS, Fault, kill_broker, mosquitto_of, schedule, wait_until_saved
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


def test_what_a_broker_drops_that_was_killed_before_its_first_save_the_library_sends_again(tmp_path: Path) -> None:
    with start_broker() as broker, Site(tmp_path, broker, {MODEL: model_directory(tmp_path, "tiny")}) as site:
        site.planner()
        poll(lambda: f"serves {MODEL}" in site.log("planner"), "the planner")
        with Hepti.connect(broker.url, site=SITE, client_id="library") as hepti:
            site.kill("planner")
            kill_broker(broker)
            (broker._directory / "mosquitto.db").unlink(missing_ok=True)
            broker.start()
            raw, taken = User(broker.url), queue.SimpleQueue[bool]()
            body = json.dumps({"id": "dropped", "ids": [7, 8]}).encode()
            raw.transport.publish(raw.topics.request(MODEL, raw.name), body, 1, taken=taken.put)
            assert not taken.get(timeout=PATIENCE_S), "the broker says that nobody reads it"
            raw.transport.subscribe([(raw.topics.request(MODEL, "library"), 1)])
            raw.transport.publish(raw.topics.request(MODEL, "library"), b'{"id": "subscribed"}', 1)
            assert raw.answers.get(timeout=PATIENCE_S)[1]["id"] == "subscribed"
            pending = hepti.submit(MODEL, request_id="early", ids=[7, 8], strategy="no-such-method")
            _, dropped = raw.answers.get(timeout=PATIENCE_S)
            assert dropped["id"] == "early", "the broker has it, and nobody else"
            site.planner()
            with pytest.raises(RequestError):
                pending.result(PATIENCE_S)
            raw.close()


def test_whatever_is_lost_meanwhile_every_request_has_one_right_answer(tmp_path: Path) -> None:
    report = run(Run(75.0, seed=3, every_s=(9.0, 12.0)), tmp_path, {MODEL: model_directory(tmp_path, "tiny")})
    assert len(report.faults) >= len(KINDS)
    assert report.good, str(report)
    for kind in report.clients:
        assert set(report.errors(kind)) <= {"overloaded"}, str(report)


def test_whatever_is_lost_meanwhile_streams_and_speech_end_rightly_or_with_an_error(tmp_path: Path) -> None:
    served = {MODEL: model_directory(tmp_path, "tiny")}
    report = run(Run(90.0, seed=4, every_s=(9.0, 12.0), mixed=True), tmp_path, served)
    assert len(report.faults) >= len(KINDS)
    assert report.good, str(report)


@pytest.mark.nightly
def test_chats_that_take_over_each_other_s_caches_have_the_tokens_that_they_have_alone(tmp_path: Path) -> None:
    report = run(Run(300.0, kinds=(), clients=0, chats=6), tmp_path, {})
    assert report.good, str(report)


@pytest.mark.nightly
def test_a_site_with_mixed_load_and_peers_that_stop_holds_no_more_in_the_end(tmp_path: Path) -> None:
    # In a short run a plan that moves may be the first one for which a device loads MiniLM, or loads it again: 62 MiB.
    generous = Flat(96 * MIB, 0.3, 6, 3)
    stops = Run(40.0, 2, ("agent stopped",), (14.0, 16.0), clients=0, mixed=True, pinned=2, flat=generous)
    report = run(stops, tmp_path, {})
    assert report.good, str(report)


def held(*growth: tuple[float, int, int], most: float = float("inf")) -> Held:
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
def test_an_error_that_no_fault_explains_fails_a_run(what: Run, begun_s: list[float], count: int) -> None:
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
def test_a_process_is_flat_or_the_report_names_its_growth(process: Held, wrong: bool) -> None:
    assert len(list(process.wrong("p", Flat()))) == wrong


def test_what_comes_after_a_broker_kill_waits_for_the_planner(tmp_path: Path) -> None:
    with start_broker() as broker, Site(tmp_path, broker, {MODEL: model_directory(tmp_path, "tiny")}) as site:
        site.planner()
        poll(lambda: f"serves {MODEL}" in site.log("planner"), "the planner")
        wait_until_saved(broker)
        site.kill("planner")
        kill_broker(broker)
        broker.start()
        user, taken = User(broker.url), queue.SimpleQueue[bool]()
        body = json.dumps({"id": "early", "ids": [7, 8], "strategy": "no-such-method"}).encode()
        user.transport.publish(user.topics.request(MODEL, user.name), body, 1, taken=taken.put)
        assert taken.get(timeout=PATIENCE_S), "nobody is subscribed: the broker has forgotten the planner"
        site.planner()
        _, answer = user.answers.get(timeout=PATIENCE_S)
        assert answer["id"] == "early"
        user.close()


@pytest.mark.parametrize("away", ["ended", "silent", "never there"])
def test_who_is_told_to_end_while_the_broker_is_away_ends(tmp_path: Path, away: str) -> None:
    with start_broker() as broker:
        site, stopped = Site(tmp_path, broker, {MODEL: model_directory(tmp_path, "tiny")}), None
        try:
            if away == "never there":
                broker.stop()
                site.agent("a")  # a planner without a broker ends by itself
                poll(lambda: UNMET in site.log("a"), "an agent that looks for its broker")
            else:
                site.planner()
                site.agent("a")
                poll(lambda: "a has joined" in site.log("planner"), "planner and agent")
            if away == "silent":  # as a broker whose host has lost power: the connection seems to stand
                stopped = mosquitto_of(broker)
                stopped.suspend()
            elif away == "ended":
                broker.stop()
                for name in site.running:
                    poll(lambda name=name: UNMET in site.log(name), f"{name} knows of it")
            for name, process in dict(site.running).items():
                begun = time.monotonic()
                process.terminate()
                code = process.wait(ENDS_S)
                print(f"{name} ended {time.monotonic() - begun:.2f} s after SIGTERM")
                assert code == 0, site.log(name)[-2000:]
                del site.running[name]
        finally:
            if stopped is not None:
                stopped.resume()
            site.close()


@pytest.mark.parametrize("frozen_s", FROZEN_S)
def test_no_request_suffers_from_a_broker_that_is_frozen_and_comes_back(tmp_path: Path, frozen_s: float) -> None:
    with start_broker() as broker:
        site = Site(tmp_path, broker, {MODEL: model_directory(tmp_path, "tiny")})
        frozen = mosquitto_of(broker)
        try:
            site.planner()
            site.agent("a")
            site.agent("b")
            with Hepti.connect(broker.url, site=SITE) as hepti:
                hepti.wait_ready(MODEL, PATIENCE_S)
                user = User(broker.url)
                frozen.suspend()
                pending = hepti.submit(MODEL, ids=[7, 8])
                for number in range(FROZEN_REQUESTS):
                    body = json.dumps({"id": f"q{number}", "ids": [7, 8, number]}).encode()
                    user.transport.publish(user.topics.request(MODEL, user.name), body, 1)
                poll(lambda: "the broker is silent" in site.log("planner"), "the planner's notice")
                time.sleep(frozen_s)
                frozen.resume()
                answered: set[str] = set()
                while len(answered) < FROZEN_REQUESTS:
                    _, answer = user.answers.get(timeout=PATIENCE_S)
                    assert answer["ok"], answer
                    answered.add(answer["id"])
                assert pending.result(PATIENCE_S).raw["ok"]
                user.close()
        finally:
            frozen.resume()
            site.close()


def test_a_schedule_is_known_by_its_seed_and_has_every_kind_in_turn() -> None:
    first, again, other = (list(schedule(seed, 200.0, (5.0, 9.0))) for seed in (1, 1, 2))
    assert first == again != other
    for start in range(0, len(first) - len(KINDS) + 1, len(KINDS)):
        assert {fault.kind for fault in first[start : start + len(KINDS)]} == set(KINDS)


def test_the_longest_silence_after_a_fault_is_its_own() -> None:
    faults = [Fault(0.0, "planner killed", "planner"), Fault(5.0, "broker killed", "broker")]
    answered = [*np.arange(0.0, 1.0, 0.1), *np.arange(3.0, 5.0, 0.1), *np.arange(6.0, 9.0, 0.1)]
    silence_of = silences(faults, [1.0, 5.0], {MODEL: answered})
    assert [gap.seconds for gap in silence_of["planner killed"]] == [pytest.approx(2.0)]
    assert [gap.seconds for gap in silence_of["broker killed"]] == [pytest.approx(1.0)]
