"""Posteriors of measured quantities: learned noise, detected changes, contradicted meters."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path

import numpy as np
import pytest

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.planner.estimates import (
    FIRST_SD,
    METHOD_SD,
    QUANTITIES,
    SINGLE_SD,
    MethodEstimates,
    SiteEstimates,
    strategy_key,
)
from hepti_mqtt.planner.quantities import Noise, Prior, Quantity, with_kin
from hepti_mqtt.protocol.messages import Heartbeat, LinkReport

ANY = Prior(0.0, 0.2, 0.002, {"x": Noise(0.2, 0.3)})
RECORDED = Path(__file__).parents[2] / "golden" / "still-240.jsonl.gz"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def white(count: int, sd: float, seed: int = 0) -> np.ndarray:
    return rng(seed).normal(0, sd, count)


def correlated(count: int, sd: float, tau: float, seed: int = 0) -> np.ndarray:
    """Return an Ornstein-Uhlenbeck process that forgets in `tau` observations."""
    keep, out = exp(-1 / tau), np.zeros(count)
    steps = rng(seed).normal(0, sd * sqrt(1 - keep * keep), count)
    for i in range(1, count):
        out[i] = keep * out[i - 1] + steps[i]
    return out


def heavy(count: int, sd: float, seed: int = 0) -> np.ndarray:
    return sd * rng(seed).standard_t(3, count)


NOISES = {"white": white(2000, 0.2), "correlated": correlated(2000, 0.2, 8), "heavy": heavy(2000, 0.1)}


def fed(values, prior: Prior = ANY, stream: str = "x", step_s: float = 1.0) -> Quantity:
    quantity = Quantity(prior, 0.0)
    for i, value in enumerate(values):
        quantity.observe(float(value), stream, 1.0, i * step_s, alone=True)
    return quantity


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_posterior_is_as_far_off_as_it_says(noise) -> None:
    quantity = fed(0.5 + noise)
    assert abs(quantity.mean - 0.5) < 3 * quantity.sd()
    assert quantity.sd() < 0.1


def test_noise_that_repeats_itself_says_less() -> None:
    assert fed(NOISES["correlated"]).sd() > 1.5 * fed(NOISES["white"]).sd()


def test_what_was_not_observed_for_long_is_less_sure() -> None:
    quantity = fed(white(100, 0.1))
    assert quantity.sd(100 + 3600.0) > 2 * quantity.sd(100.0)


def observations_until_found(size: float, sd: float, seed: int) -> int:
    quantity = Quantity(ANY, 0.0)
    noise = white(400, sd, seed)
    for i in range(300):
        assert quantity.observe(float(noise[i]), "x", 1.0, float(i)) is None
    for i in range(300, 400):
        if quantity.observe(log(size) + float(noise[i]), "x", 1.0, float(i)) == "changed":
            assert abs(quantity.mean - log(size)) < 3 * sd
            return i - 299
    return 100


@pytest.mark.parametrize(
    ("size", "sd", "most"), [(1.5, 0.05, 2), (2, 0.05, 2), (4, 0.05, 2), (1.5, 0.2, 25), (2, 0.2, 6), (4, 0.2, 3)]
)
def test_a_step_is_found_after_so_many_observations(size: float, sd: float, most: int) -> None:
    assert np.median([observations_until_found(size, sd, seed) for seed in range(9)]) <= most
    assert np.median([observations_until_found(1 / size, sd, seed) for seed in range(9)]) <= most


def test_nothing_changes_in_a_hundred_thousand_noisy_observations() -> None:
    quantity = Quantity(ANY, 0.0)
    for i, value in enumerate(white(100_000, 0.2, 5)):
        assert quantity.observe(float(value), "x", 1.0, float(i)) is None


def test_a_stall_that_ends_brings_back_what_was_known() -> None:
    quantity = Quantity(ANY, 0.0)
    verdicts = []
    for i, noise in enumerate(white(240, 0.05)):
        stalled = 200 <= i < 215
        verdicts.append(quantity.observe(float(noise) + stalled * log(3), "x", 1.0, float(i)))
        if i == 199:
            before = quantity.mean
        if verdicts[-1] == "changed":
            age_s = i - quantity.changes[-1].began_s
            assert quantity.remaining(float(i)).median_s == pytest.approx(1.5 * age_s, rel=0.05), (
                "1.5 times as long again"
            )
    assert [x for x in verdicts if x] == ["changed", "ended"]
    assert quantity.mean == pytest.approx(before, abs=0.05)
    assert not quantity.changes


def test_a_meter_goes_half_of_the_way_unless_nobody_contradicts_it() -> None:
    for alone in (False, True):
        quantity = Quantity(QUANTITIES["slowdown"].prior, 0.0)
        for i in range(50):
            quantity.observe(0.01 * (i % 2), "run", 1.0, float(i))
        verdicts = [quantity.observe(log(4), "meter", 1.0, 50.0 + i, alone=alone) for i in range(5)]
        assert ("changed" in verdicts) is alone
    quantity = Quantity(QUANTITIES["slowdown"].prior, 0.0)
    for i in range(50):
        quantity.observe(0.01 * (i % 2), "run", 1.0, float(i))
    assert quantity.observe(log(4), "run", 1.0, 51.0) is None, "one stall is no change"
    assert quantity.observe(log(4), "run", 1.0, 52.0) == "changed"


def test_kin_stay_equal_and_who_is_apart_speaks_for_itself() -> None:
    kin = [fed(0.1 + correlated(200, 0.2, 8, seed)) for seed in range(4)]
    spread = np.std([x.mean for x in kin])
    assert np.std([mean for mean, _ in with_kin(kin, 200.0)]) < 0.5 * spread + 0.01
    kin[3] = fed(1.0 + white(200, 0.05))
    means = [mean for mean, _ in with_kin(kin, 200.0)]
    assert means[3] == pytest.approx(kin[3].mean, abs=0.03)


# -- a site -----------------------------------------------------------------------------------------------------------


def beat(slowdown: float = 1.0, rate: float | None = None, **more) -> Heartbeat:
    return Heartbeat(1, 0, 0.0, 1 << 30, None, None, rate, slowdown, 0, **more)


def site(*names: str) -> SiteEstimates:
    estimates = SiteEstimates()
    for name in names:
        estimates.add_device(name, "board")
    return estimates


def test_what_was_not_measured_has_defaults_and_a_device_that_is_not_known_is_ignored() -> None:
    estimates = site("a")
    assert estimates.slowdown("a") == estimates.slowdown("nobody") == 1.0
    assert estimates.link("a").up_bytes_per_s >= 1e9
    assert estimates.frame_cost("a") is None
    estimates.record_heartbeat("nobody", beat(3.0), 0.0, busy=False, loading=False)
    estimates.record_compute("nobody", 1.0, 0.0)
    estimates.record_edge("a", "nobody", 1e6, 0.0)
    assert estimates.describe(0.0) == {"a": ()}


def test_runs_are_believed_more_than_a_meter_that_says_ten_times_as_fast_and_it_is_named() -> None:
    estimates, noise = site("a", "b"), white(200, 0.05)
    for i in range(60):
        estimates.record_heartbeat("a", beat(0.1 * exp(noise[i])), float(i), busy=True, loading=False)
        estimates.record_heartbeat("b", beat(exp(noise[60 + i])), float(i), busy=True, loading=False)
        for name in "ab":
            estimates.record_compute(name, float(noise[120 + i]), i + 0.5)
    assert estimates.slowdown("a") == pytest.approx(1.0, abs=0.07)
    assert "contradicts itself" in estimates.describe(60.0)["a"][0]
    assert not any("contradict" in text for text in estimates.describe(60.0)["b"])
    for i in range(60, 100):  # in no plan any more, so that nobody contradicts it: it is known to lie
        estimates.record_heartbeat("a", beat(0.1 * exp(noise[i])), float(i), busy=False, loading=False)
    assert estimates.slowdown("a") == pytest.approx(1.0, abs=0.15)


def test_a_link_that_says_more_than_exchanges_carry_is_corrected_and_named() -> None:
    estimates, noise = site("a", "b"), white(100, 0.05)
    for i in range(40):
        peers = {"b": LinkReport(2e-3 * exp(noise[i]), 125e6 * exp(noise[i]))}
        estimates.record_heartbeat("a", beat(peers=peers), float(i), busy=True, loading=False)
        estimates.record_edge("a", "b", 5e6 * exp(noise[50 + i]), i + 0.5)
    link = estimates.peer_link("a", "b")
    assert link is not None
    assert link.bytes_per_s is not None
    assert link.bytes_per_s < 25e6, "sharing explains a factor of two"
    assert any("exchanges say" in text for text in estimates.describe(40.0)["a"])


def test_exchanges_that_share_a_link_say_when_it_falls_and_comes_back() -> None:
    estimates, noise = site("a", "b", "c", "d"), white(400, 0.1)
    pairs = [("a", x) for x in "bcd"]

    def exchange(begin: int, stop: int, factor: float) -> None:
        for i in range(begin, stop):
            for source, target in pairs:
                estimates.record_edge(source, target, factor * 10e6 * exp(noise[i]), float(i))

    for i in range(10):
        peers = {x: LinkReport(2e-3, 30e6 * exp(noise[i])) for x in "bcd"}
        estimates.record_heartbeat("a", beat(peers=peers), float(i), busy=False, loading=False)
    estimates.begin_plan("abcd")
    exchange(10, 60, 1.0)
    rate = lambda: estimates.peer_link("a", "b").bytes_per_s  # noqa: E731
    assert rate() == pytest.approx(30e6, rel=0.15), "that three share the link is no fault of it"
    planned = estimates.means()
    exchange(60, 66, 0.42)
    assert rate() == pytest.approx(0.42 * 30e6, rel=0.2)
    assert "rate" in str(estimates.moved(planned, ("a", "b"), 66.0))
    young = estimates.youngest_change(("a", "b"), 66.0)
    assert young is not None
    assert young.before.peer_rates["a", "b"][0] == pytest.approx(-log(0.42), abs=0.2)
    exchange(66, 76, 1.0)
    assert rate() == pytest.approx(30e6, rel=0.15)
    estimates.begin_plan("ab")
    exchange(80, 100, 2.9)  # another plan, in which one exchange has the link to itself
    assert rate() == pytest.approx(30e6, rel=0.2)


def all_exchange(
    estimates: SiteEstimates, names: str, begin: int, stop: int, slow: str = "", factor: float = 1.0
) -> None:
    """Let all devices exchange at 10 MB/s each way, once a second, and less with one of them."""
    for i in range(begin, stop):
        for source in names:
            for target in names.replace(source, ""):
                noise = exp(float(rng(i * 10000 + ord(source) * 100 + ord(target)).normal(0, 0.1)))
                of_pair = factor if slow in (source, target) and slow else 1.0
                estimates.record_edge(source, target, of_pair * 10e6 * noise, float(i))


def test_a_host_whose_line_falls_is_told_from_those_that_it_exchanges_with() -> None:
    estimates = site("a", "b", "c", "d")
    for i in range(10):
        for name in "abcd":
            peers = {x: LinkReport(2e-3, 30e6 + i) for x in "abcd" if x != name}
            estimates.record_heartbeat(name, beat(rate=30e6 + i, peers=peers), float(i), busy=False, loading=False)
    estimates.begin_plan("abcd")
    all_exchange(estimates, "abcd", 10, 40)
    planned = estimates.means()
    all_exchange(estimates, "abcd", 40, 43, "b", 0.2)
    assert estimates.peer_link("b", "a").bytes_per_s == pytest.approx(6e6, rel=0.3)
    assert estimates.peer_link("c", "b").bytes_per_s == pytest.approx(6e6, rel=0.3)
    assert estimates.peer_link("c", "a").bytes_per_s == pytest.approx(30e6, rel=0.2)
    assert " of b " in str(estimates.moved(planned, "abcd", 43.0))
    for i in range(43, 47):  # left out: only the broker hears of it
        estimates.record_heartbeat("b", beat(rate=30e6 + i), float(i), busy=False, loading=False)
    assert estimates.peer_link("b", "a").bytes_per_s > 20e6


def test_a_device_of_which_nothing_is_heard_is_ever_more_likely_as_it_was() -> None:
    estimates = site("a", "b")
    for i in range(40):
        estimates.record_compute("a", log(4) * (i >= 30) + 0.01 * (i % 3), float(i))
        estimates.record_heartbeat("b", beat(rate=30e6 + i), float(i), busy=False, loading=False)
    assert estimates.slowdown("a") == pytest.approx(4, rel=0.1)
    assert estimates.draws("a", 45.0).slowdowns["a"].min() < -1
    for i in range(40, 80):  # its meter sees no ops
        estimates.record_heartbeat("a", beat(1.0), float(i), busy=False, loading=False)
        estimates.record_heartbeat("b", beat(rate=30e6 + i), float(i), busy=False, loading=False)
    assert estimates.no_evidence_s("a", 80.0) == pytest.approx(41)
    assert estimates.slowdown("a") == pytest.approx(1, rel=0.1)
    draws = estimates.draws("a", 80.0).slowdowns["a"]
    assert 0.1 < (draws > 1).mean() < 0.5, "or it is as slow as it was"
    estimates.record_compute("a", log(4), 81.0)
    assert estimates.slowdown("a") == pytest.approx(4, rel=0.2)
    estimates.record_compute("a", 0.02, 900.0)
    assert estimates.slowdown("a") == pytest.approx(1, rel=0.1), (
        "the first word after a silence says whether it has ended"
    )
    assert estimates.no_evidence_s("a", 910.0) == 0


def test_readings_that_repeat_the_last_one_are_none() -> None:
    once, often = site("a"), site("a")
    for i in range(30):
        often.record_heartbeat("a", beat(1.4, 5e6), float(i), busy=False, loading=False)
    once.record_heartbeat("a", beat(1.4, 5e6), 0.0, busy=False, loading=False)
    assert often.slowdown("a") == once.slowdown("a") < 1.3
    assert often.link("a") == once.link("a")


def test_probes_beside_exchanges_that_find_less_are_doubted() -> None:
    estimates = site("a")
    for i in range(5):
        estimates.record_heartbeat("a", beat(rate=3e7 + i), float(i), busy=False, loading=False)
    for i in range(5, 10):
        estimates.record_heartbeat("a", beat(rate=1.5e7 + i), float(i), busy=True, loading=False)
    assert estimates.link("a").up_bytes_per_s > 2.5e7


def test_a_load_hides_no_link_and_makes_none_slower() -> None:
    estimates = site("a", "b")
    peers = lambda round_trip_s, rate: {"b": LinkReport(round_trip_s, rate)}  # noqa: E731
    estimates.record_heartbeat("a", beat(peers=peers(40e-3, 2e6)), 0.0, busy=False, loading=True)
    assert estimates.peer_link("a", "b").latency_s <= 0.5e-3, "a busy device answers late; its link was not measured"
    assert estimates.peer_link("a", "b").bytes_per_s is None
    estimates.record_heartbeat("b", beat(peers={"a": LinkReport(0.2e-3, 2e6)}), 1.0, busy=False, loading=True)
    assert estimates.peer_link("a", "b").latency_s == pytest.approx(0.1e-3, rel=0.1), "either end measures it"
    estimates.record_heartbeat("a", beat(peers=peers(4e-3, 3e7)), 20.0, busy=False, loading=False)
    assert estimates.peer_link("a", "b").bytes_per_s == pytest.approx(3e7, rel=0.1)


def test_loads_change_little() -> None:
    estimates = site("a")
    for i in range(30):
        estimates.record_heartbeat("a", beat(1 + 1e-3 * i, rate=3e7 + i), float(i), busy=True, loading=False)
        estimates.record_compute("a", 0.01 * (i % 3), i + 0.5)
    for i in range(30, 60):
        estimates.record_heartbeat("a", beat(3 + 1e-3 * i, rate=2e6 + i), float(i), busy=True, loading=True)
    assert estimates.slowdown("a") < 1.25
    assert estimates.link("a").up_bytes_per_s > 2.5e7
    assert estimates.last_change_s < 0


def test_an_overdue_run_lets_meters_speak() -> None:
    estimates = site("a")
    for i in range(30):
        estimates.record_heartbeat("a", beat(1 + 1e-3 * i), float(i), busy=True, loading=False)
        estimates.record_compute("a", 0.01 * (i % 3), i + 0.5)
    for i in range(30, 34):
        estimates.record_overdue("a", i - 0.1)
        estimates.record_heartbeat("a", beat(4 + 1e-3 * i), float(i), busy=True, loading=False)
    assert estimates.slowdown("a") == pytest.approx(4.0, rel=0.2)
    assert estimates.last_change_s == 31.0


def test_draws_are_common_and_as_wide_as_what_is_not_known() -> None:
    estimates = site("a", "b")
    for i in range(20):
        estimates.record_heartbeat("a", beat(1 + 1e-2 * i, 1e7 + i), float(i), busy=False, loading=False)
    few, more = estimates.draws("a", 20.0, seed=3), estimates.draws("ab", 20.0, seed=3)
    assert (few.slowdowns["a"] == more.slowdowns["a"]).all()
    assert few.rates["a"].shape == (48,)
    assert (estimates.draws("a", 20.0, seed=4).rates["a"] != few.rates["a"]).any()
    assert few.slowdowns["a"].mean() == pytest.approx(0, abs=1e-6)
    assert estimates.draws("a", 4000.0).slowdowns["a"].std() > 1.5 * few.slowdowns["a"].std()


def test_a_device_that_starts_anew_is_not_what_it_was() -> None:
    estimates = site("a", "b")
    for i in range(5):
        peers = {"b": LinkReport(1e-3 + i * 1e-6, 3e6)}
        estimates.record_heartbeat("a", beat(8.0 + i, peers=peers), float(i), busy=False, loading=False)
    assert estimates.slowdown("a") > 5
    estimates.forget_device("a")
    estimates.add_device("a", "board")
    assert estimates.slowdown("a") == 1.0
    assert estimates.peer_links("a") == {}


def test_a_recorded_site_in_which_nothing_changes_raises_no_alarm_after_the_first_minute() -> None:
    estimates, alarms, planned = site(), [], {}
    with gzip.open(RECORDED, "rt") as lines:
        for line in filter(lambda line: "device" in line, map(json.loads, lines)):
            t, device = line.pop("t"), line.pop("device")
            estimates.add_device(device, "host")
            reports = {name: LinkReport(*report) for name, report in line.pop("peers").items()}
            estimates.record_heartbeat(device, Heartbeat(**line, peers=reports), t, busy=True, loading=False)
            if t > 60:
                planned = planned or estimates.means()
                if (text := estimates.moved(planned, ("h1", "h2", "h3", "h4"), t)) is not None:
                    alarms.append((t, text))
    assert not alarms, alarms[:3]


# -- methods ----------------------------------------------------------------------------------------------------------

SPLIT = Plan("m", PlanVersion(1, 1), "row", ("a", "b"), "a", {"attention": "kv"}, predicted_s=0.2, predicted_tokens=100)
OTHER = replace(SPLIT, strategy="column", options={})
SINGLE = replace(SPLIT, strategy="single", devices=("a",), options={})


def after(*seconds: float, plan: Plan = SPLIT, tokens: int = 100, spread: float = 0.0) -> MethodEstimates:
    estimates = MethodEstimates()
    for i, s in enumerate(seconds):
        estimates.record_run(plan, tokens, s, float(i), spread)
    return estimates


def test_runs_teach_their_method_and_less_of_others() -> None:
    learned = after(*[0.3] * 8)
    assert learned.factor(SPLIT) == pytest.approx(1.5, rel=0.05)
    assert learned.factor(OTHER) == learned.factor(SPLIT)
    assert learned.sd(OTHER) >= METHOD_SD > 2 * learned.sd(SPLIT)
    assert learned.factor(SINGLE) == 1.0
    assert after().sd(OTHER) == FIRST_SD > learned.sd(SINGLE) == SINGLE_SD
    assert after(*[0.3] * 8, plan=SINGLE).factor(SPLIT) == 1.0


def test_one_stall_teaches_little() -> None:
    assert after(*[0.2] * 8, 9.0, 0.2).factor(SPLIT) == pytest.approx(1.0, abs=0.1)


def test_a_run_under_unknown_links_teaches_little_of_its_method() -> None:
    assert after(0.3, spread=1.0).factor(SPLIT) < 1.05 < after(0.3).factor(SPLIT)


@pytest.mark.parametrize("tokens", [10, 79, 126, 500])
def test_another_length_than_the_predicted_one_teaches_nothing(tokens: int) -> None:
    assert not after(*[0.4] * 8, tokens=tokens).corrections().factors


def side_by_side(*groups: tuple[str, ...], **options: str) -> Plan:
    """Return replicas of one device each, or of several that a split divides."""
    inside = [replace(SPLIT, devices=g) if len(g) > 1 else replace(SINGLE, devices=g, root=g[0]) for g in groups]
    devices = tuple(device for group in groups for device in group)
    return replace(SPLIT, strategy="replicas", options=options, devices=devices, replicas=tuple(inside))


def test_what_replicas_teach_is_of_their_whole_plan_and_makes_none_of_its_parts_slower() -> None:
    whole = side_by_side(("a",), ("b",))
    learned = MethodEstimates()
    for i in range(8):
        for part in whole.replicas:
            learned.record_run(part, 100, 0.6, float(i), whole=whole)
    assert learned.factor(whole) == pytest.approx(3.0, rel=0.05)
    assert learned.factor(SINGLE) == learned.factor(SPLIT) == 1.0
    assert learned.factor(side_by_side(("a",), ("b",), ("c",))) == 1.0
    assert list(learned.corrections().factors) == [strategy_key(whole)]


def test_a_change_whose_cause_was_a_link_is_taken_back() -> None:
    learned = after(*[0.2] * 30)
    for i in range(30, 36):
        learned.record_run(SPLIT, 100, 0.8, float(i))
    assert learned.factor(SPLIT) == pytest.approx(4.0, rel=0.1)
    learned.undo_since(20.0)
    assert learned.factor(SPLIT) == pytest.approx(1.0, abs=0.05)
