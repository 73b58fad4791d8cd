"""The client over a real broker, with a scripted planner."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from client_support import A_PLAN, NO_PLAN, PATIENCE_S, Planner
from limited_broker import mosquitto_with
from site_processes import poll

from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import (
    ConfigError,
    DeadlineError,
    NetworkError,
    PlanError,
    UnknownModelError,
)
from hepti_mqtt.transport.base import Connected


@pytest.fixture
def hepti(broker, planner, site):
    planner.online()
    with Hepti.connect(broker.url, site=site, client_id="me") as h:
        poll(lambda: h.planner_online, "the planner's status, which would repeat waiting requests if it came later")
        yield h


def test_ask_and_answer(hepti, planner):
    future = hepti.submit("m", text="hello", deadline_ms=500)
    request = planner.next()
    assert (request[0].model, request[0].client) == ("m", "me")
    assert request[1] == {"text": "hello", "deadline_ms": 500, "id": request[1]["id"]}
    planner.answer(request)
    answer = future.result(PATIENCE_S)
    assert answer.result == "hello"
    assert answer.latency_ms > 0


def test_an_estimate_is_replaced_by_the_forecast_of_the_same_request(hepti, planner):
    future = hepti.submit("m", text="hello", wire="f16")
    estimate = {"forecast": "estimated", "predicted_ms": 1.0, "predicted_bytes": 10}
    planner.answer(planner.next(), plan={"id": "1.1", "devices": {"a": 1.0}}, **estimate)
    estimated = future.result(PATIENCE_S)
    for version, forecast in (("1.2", "estimated"), ("1.1", "simulated")):
        with ThreadPoolExecutor(1) as pool:
            exact = pool.submit(hepti.foretold, estimated, text="hello", wire="f16", timeout_s=PATIENCE_S)
            request = planner.next()
            assert request[1] == {"id": request[1]["id"], "text": "hello", "wire": "f16", "want": "plan"}
            simulated = {"forecast": "simulated", "predicted_ms": 2.0, "predicted_bytes": 20}
            planner.answer(request, result=None, plan={"id": version, "devices": {"a": 1.0}}, **simulated)
            foretold = exact.result(PATIENCE_S)
        assert (foretold.raw["forecast"], foretold.result) == (forecast, "hello"), "nothing under another plan"
    assert (foretold.raw["predicted_ms"], foretold.raw["predicted_bytes"]) == (2.0, 20)
    assert hepti.foretold(foretold) is foretold


def test_an_answer_stays_as_it_is_when_its_forecast_cannot_be_had(hepti, planner):
    future = hepti.submit("m", text="hello")
    planner.answer(planner.next(), plan={"id": "1.1"}, forecast="estimated")
    estimated = future.result(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(hepti.foretold, estimated, text="hello", timeout_s=PATIENCE_S)
        planner.answer(planner.next(), ok=False, error={"code": "overloaded", "message": "later"})
        assert kept.result(PATIENCE_S) is estimated


def test_no_answer_in_time_says_who_is_to_blame(broker, hepti, planner, site):
    with pytest.raises(DeadlineError):
        hepti.infer("m", text="x", timeout_s=0.01)
    with Hepti.connect(broker.url, site=f"{site[:50]}-empty") as alone, pytest.raises(NetworkError):
        alone.infer("m", text="x", timeout_s=0.01)


def test_a_request_that_timed_out_is_cancelled_and_not_sent_again(hepti, planner):
    with pytest.raises(DeadlineError):
        hepti.infer("m", text="x", timeout_s=0.01)
    first_request, back = sorted((planner.next()[1] for _ in range(2)), key=lambda body: "cancel" in body)
    assert back == {"cancel": first_request["id"]}
    planner.online(boot=2)
    future = hepti.submit("m", text="y")
    assert planner.next()[1]["text"] == "y"
    future.cancel()


def test_a_request_is_taken_back_while_the_broker_keeps_others(tmp_path, site):
    """A broker delivers few requests until one is answered; with QoS 1 that would come behind all the others."""
    with mosquitto_with(tmp_path, "max_inflight_messages 2") as broker:
        busy = Planner(broker.url, site, acknowledges=False)
        busy.online()
        with busy, Hepti.connect(broker.url, site=site) as h:
            poll(lambda: h.planner_online, "the planner's status")
            futures = [h.submit("m", text="x") for _ in range(4)]
            ids = [busy.next()[1]["id"] for _ in range(2)]
            futures[0].cancel()
            assert busy.next()[1]["cancel"] in ids
            for future in futures[1:]:
                future.cancel()
            assert all("cancel" in busy.next()[1] for _ in futures[1:])


def test_a_lost_broker_is_waited_for(broker, hepti, planner):
    future = hepti.submit("m", text="x")
    planner.next()
    broker.stop()
    late = hepti.submit("m", text="y")
    broker.start()
    planner.state_of(Connected)
    planner.online()
    ids = {}
    while set(ids) != {"x", "y"}:
        request = planner.next()
        ids[request[1]["text"]] = request
    for request in ids.values():
        planner.answer(request)
    assert future.result(PATIENCE_S).result == "x"
    assert late.result(PATIENCE_S).result == "y"


def test_models_and_plans(hepti, planner):
    planner.record("m", reason="because")
    planner.record("n")
    assert hepti.plan("m")["reason"] == "because"
    assert hepti.plan("n")["active"] is None
    assert hepti.models() == ["m", "n"]
    with pytest.raises(UnknownModelError):
        hepti.plan("nothing")


def test_wait_ready_waits_for_a_plan_of_the_planner_that_is_there(hepti, planner):
    planner.record(boot=0, active={"left": "behind"})
    timer = threading.Timer(0.05, lambda: planner.record(active=A_PLAN))
    timer.start()
    assert hepti.wait_ready("m", PATIENCE_S)["active"] == A_PLAN
    timer.join()
    second = {**A_PLAN, "version": [1, 2]}
    timer = threading.Timer(0.05, lambda: planner.record(active=second, unused={"b": "put aside"}))
    timer.start()
    shown = hepti.wait_ready("m", PATIENCE_S, lambda record: "b" in record["unused"])
    assert shown["active"] == second
    timer.join()


def test_wait_ready_tells_the_planners_reason(hepti, planner):
    planner.record(error={"code": "no_plan", "message": "a lacks 5 MiB", "detail": ""})
    with pytest.raises(PlanError):
        hepti.wait_ready("m", timeout=0.05)
    with pytest.raises(PlanError):
        hepti.wait_ready("m", timeout=1000, patience_s=0.0)


def serving(planner, *fields):
    """Answer requests, one with each of these fields; the last answer that is none comes before the first plan."""

    def serve():
        for more in fields:
            planner.answer(planner.next(), **more)
            if more and {} in fields:
                planner.record(active=A_PLAN)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_request_with_a_time_waits_for_a_first_plan(hepti, planner):
    planner.record(error=NO_PLAN["error"])
    assert hepti.plan("m")["active"] is None
    server = serving(planner, NO_PLAN, {})
    assert hepti.infer("m", text="x", timeout_s=PATIENCE_S).result == "x"
    server.join()


def test_without_a_time_or_beside_a_plan_it_fails_at_once(hepti, planner):
    planner.record(error=NO_PLAN["error"])
    server = serving(planner, NO_PLAN, NO_PLAN)
    assert hepti.plan("m")["active"] is None
    with pytest.raises(PlanError):
        hepti.infer("m", text="x")
    planner.record(active=A_PLAN)
    hepti.wait_ready("m", PATIENCE_S)
    with pytest.raises(PlanError):
        hepti.infer("m", text="x", timeout_s=PATIENCE_S)
    server.join()


def test_no_broker_is_said_at_once(monkeypatch):
    monkeypatch.delenv("HEPTI_BROKER", raising=False)
    with pytest.raises(ConfigError):
        Hepti.connect()
    with pytest.raises(NetworkError):
        Hepti.connect("mqtt://127.0.0.1:1", timeout=2)


def test_the_environment_names_broker_and_site(broker, planner, site, monkeypatch):
    monkeypatch.setenv("HEPTI_BROKER", broker.url)
    monkeypatch.setenv("HEPTI_SITE", site)
    planner.online()
    planner.record("here")
    with Hepti.connect() as hepti:
        assert hepti.models() == ["here"]
