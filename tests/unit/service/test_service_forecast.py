"""Forecasts: computed on a thread of their own, looked up without waiting."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from service_support import CLUSTER, plan_for
from sites import sent_bytes
from swarm import profile_curve

from hepti_mqtt.core.profiles import DeviceProfile
from hepti_mqtt.cost.simulator import TopicNames, simulate
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.planner import RequestSimulation
from hepti_mqtt.runtime.coordinator.plans import PlanSnapshot
from hepti_mqtt.runtime.coordinator.requests import RunStats
from hepti_mqtt.service import forecast as module
from hepti_mqtt.service.forecast import PAUSE_S, UNPAUSED_S, Forecast, Forecasts, shares
from hepti_mqtt.strategies.plan_programs import device_programs

SHAPES = [TokenBatch((n,)) for n in (5, 6, 7)]


@pytest.fixture(scope="module")
def spec(bert):
    return bert.spec


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def forecasts(spec, clock):
    return Forecasts("home", {"bert": spec}, lambda: clock.now)


@pytest.fixture
def simulated(monkeypatch):
    """The (plan number, shape) of every forecast, in order of simulation."""
    keys = []
    monkeypatch.setattr(
        module, "device_programs", lambda *a: keys.append((a[1].version.number, a[2])) or device_programs(*a)
    )
    return keys


def standing(spec, number=1):
    return PlanSnapshot(plan_for(spec, number, predicted_bytes=1000, predicted_tokens=10), CLUSTER)


def run_of(one, shape):
    return RunStats(one.plan, one.cluster, shape, {}, {}, {}, 0)


@pytest.fixture
def make_all(forecasts, clock):
    """Make all forecasts that wait, in a pause of their model."""

    def run():
        clock.now += PAUSE_S
        while forecasts.step():
            continue

    return run


def test_the_newest_request_is_foreseen_first_and_each_once(forecasts, spec, simulated, make_all):
    one = standing(spec)
    forecasts.set_plans((one,))
    for shape in SHAPES:
        forecasts.request("bert", [shape])
    forecasts.request("bert", SHAPES[:1])
    make_all()
    assert simulated == [(1, SHAPES[0]), (1, SHAPES[2]), (1, SHAPES[1])]
    exact = sent_bytes(TopicNames("home", "bert"), spec, SHAPES[1], device_programs(spec, one.plan, SHAPES[1]))
    forecast = forecasts.lookup(one.plan, SHAPES[1])
    assert (forecast.nbytes, forecast.tokens, forecast.simulated) == (exact, 6, True)


def test_a_run_of_several_requests_is_foreseen_when_its_shape_comes_again(forecasts, spec, simulated, make_all):
    one, shape = standing(spec), TokenBatch((5, 6))
    forecasts.set_plans((one,))
    first = run_of(one, shape)
    forecasts.record_batched_run(first)
    forecasts.record_batched_run(first)  # by another request of the same run
    make_all()
    assert not simulated
    assert not forecasts.lookup(one.plan, shape).simulated
    forecasts.record_batched_run(run_of(one, shape))
    make_all()
    assert simulated == [(1, shape)]
    exact = sent_bytes(TopicNames("home", "bert"), spec, shape, device_programs(spec, one.plan, shape))
    assert (forecasts.lookup(one.plan, shape).nbytes, forecasts.lookup(one.plan, shape).simulated) == (exact, True)


def test_a_plan_that_is_priced_anew_is_foreseen_anew_by_the_measurements_of_now(forecasts, spec, simulated, make_all):
    one = standing(spec)
    forecasts.set_plans((one,))
    forecasts.request("bert", SHAPES[:1])
    make_all()
    before = forecasts.lookup(one.plan, SHAPES[0])
    slow = DeviceProfile("any", profile_curve(2e8), 2e8, 1e9)
    repriced = PlanSnapshot(replace(one.plan, predicted_s=0.008), replace(CLUSTER, devices={"a": slow, "b": slow}))
    forecasts.set_plans((repriced,))
    assert not forecasts.lookup(repriced.plan, SHAPES[0]).simulated
    make_all()
    assert simulated == [(1, SHAPES[0])] * 2
    assert forecasts.lookup(repriced.plan, SHAPES[0]).seconds > before.seconds
    forecasts.set_plans((repriced,))
    make_all()
    assert len(simulated) == 2, "nothing has changed since"


def test_what_the_search_has_simulated_is_known_at_once_and_not_simulated_again(forecasts, spec, simulated, make_all):
    one, other = standing(spec), standing(spec, 2)
    simulation = simulate(
        TopicNames("home", "bert"), spec, SHAPES[0], device_programs(spec, one.plan, SHAPES[0]), CLUSTER
    )
    forecasts.request("bert", SHAPES[:2])
    forecasts.set_plans((replace(one, simulated=RequestSimulation(SHAPES[0], simulation)), other))
    forecast = forecasts.lookup(one.plan, SHAPES[0])
    assert not forecasts.lookup(other.plan, SHAPES[0]).simulated, "the search has simulated it under one plan"
    make_all()
    assert sorted(simulated, key=str) == [(1, SHAPES[1]), (2, SHAPES[0]), (2, SHAPES[1])]
    same_plan = replace(one, cluster=replace(CLUSTER))
    forecasts.set_plans((same_plan,))
    assert not forecasts.lookup(one.plan, SHAPES[0]).simulated, "by other measurements it takes another time"
    make_all()
    assert forecasts.lookup(one.plan, SHAPES[0]) == forecast


def test_what_is_only_foreseen_waits_for_a_pause_of_its_model(forecasts, spec, simulated, clock):
    forecasts.set_plans((standing(spec),))
    for shape in SHAPES[:2]:
        forecasts.request("bert", [shape])
        forecasts.set_busy_models(frozenset({"bert"}))
        clock.now += 1
        assert not forecasts.step(), "the devices compute"
        forecasts.set_busy_models(frozenset())
        clock.now += 0.9 * PAUSE_S
        assert not forecasts.step(), "the next request may be on its way"
    clock.now += 0.2 * PAUSE_S
    assert forecasts.step()
    forecasts.set_busy_models(frozenset({"other"}))
    assert forecasts.step()
    assert simulated == [(1, SHAPES[1]), (1, SHAPES[0])]


def test_without_a_pause_one_forecast_is_made_now_and_then(forecasts, spec, simulated, clock):
    forecasts.set_plans((standing(spec),))
    forecasts.set_busy_models(frozenset({"bert"}))
    for _ in range(round(2.5 * UNPAUSED_S)):
        forecasts.request("bert", SHAPES)
        clock.now += 1
        while forecasts.step():
            continue
    assert simulated == [(1, SHAPES[2]), (1, SHAPES[1])]


def test_what_is_asked_for_waits_for_no_pause(forecasts, spec, simulated, make_all):
    one = standing(spec)
    forecasts.set_plans((standing(spec, 2),))
    forecasts.request("bert", SHAPES)
    forecasts.set_plans((one,))
    forecasts.set_busy_models(frozenset({"bert"}))
    forecasts.call_when_ready([run_of(one, TokenBatch((9,)))], lambda: simulated.append("answered"))
    assert forecasts.step()
    assert simulated == [(1, TokenBatch((9,))), "answered"], "and comes before what is only foreseen"
    forecasts.set_busy_models(frozenset())
    make_all()
    assert {number for number, _ in simulated[2:]} == {1}, "the other plan is gone"


@pytest.fixture
def low_limits(monkeypatch):
    for name, limit in {"MAX_PENDING": 2, "KEPT": 1, "RECENT_SHAPES": 1}.items():
        monkeypatch.setattr(module, name, limit)


def test_what_waits_and_what_is_kept_is_bounded(low_limits, forecasts, spec, simulated, make_all):
    one = standing(spec)
    forecasts.set_plans((one,))
    forecasts.request("bert", SHAPES)
    make_all()
    assert simulated == [(1, SHAPES[2]), (1, SHAPES[1])], "the one that waited longest was given up"
    assert not forecasts.lookup(one.plan, SHAPES[2]).simulated
    forecasts.set_plans((one, standing(spec, 2)))
    make_all()
    assert simulated[2:] == [(2, SHAPES[2])]


def test_an_estimate_is_scaled_from_the_nearest_length_that_is_known(forecasts, spec):
    one = standing(spec)
    first = forecasts.lookup(one.plan, TokenBatch((5,)))
    assert (first.seconds, first.nbytes, first.simulated) == (pytest.approx(0.002), 500, False)
    assert shares([first]) == {"a": 0.75, "b": 0.25}
    forecasts.call_when_ready([run_of(one, TokenBatch((n,))) for n in (5, 20)], lambda: None)
    assert forecasts.step()
    forecast = forecasts.lookup(one.plan, TokenBatch((5,)))
    near = forecasts.lookup(one.plan, TokenBatch((6,)))
    assert near.nbytes == pytest.approx(1.2 * forecast.nbytes)
    assert forecast.seconds < near.seconds < 1.2 * forecast.seconds, "ops and frames cost as much"
    other = standing(spec, 2)
    assert forecasts.lookup(other.plan, TokenBatch((5,))).nbytes == 500, "of another plan nothing is known"


def test_a_mistake_leaves_an_estimate_and_an_answer(forecasts, spec, monkeypatch, caplog, make_all):
    one = standing(spec)
    monkeypatch.setattr(module, "device_programs", None)
    answered = []
    forecasts.call_when_ready([run_of(one, SHAPES[0])], lambda: answered.append(True))
    make_all()
    assert answered
    assert not forecasts.lookup(one.plan, SHAPES[0]).simulated
    assert caplog.records


def test_shares_of_runs_of_which_one_is_estimated_count_tokens():
    exact = Forecast(10, 1.0, 1, {"a": 3e9, "b": 1e9})
    guessed = Forecast(10, 1.0, 1, {"a": 1.0, "b": 1.0}, simulated=False)
    assert shares([exact, exact]) == {"a": 0.75, "b": 0.25}
    assert shares([exact, guessed]) == {"a": 0.625, "b": 0.375}
