"""The time of a plan for other speeds of devices and links, extrapolated from its price without a simulation.

The simulator divides the time of a request into work of one device alone (the root's embedding and head, the stages of
a pipeline), work of the busiest of several devices, and waiting for links. Each part grows with its slowest device or
link. Against simulations of BERT-Large and VGG-16 with devices and links up to twice as fast or slow, half of the times
are off by less than 5 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import log
from typing import Any, Final
from zlib import crc32

import numpy as np

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster, FrameCost
from hepti_mqtt.cost.simulator import DeviceUse
from hepti_mqtt.planner.candidates import Candidate
from hepti_mqtt.planner.estimates import TYPICAL_FRAME_BYTES, Draws, Floats, strategy_key
from hepti_mqtt.planner.price import Price

#: Part of the transfers hidden by compute that becomes visible on slower links: 0 to 1, depending on the method.
HIDDEN: Final = 0.5
MOST_SHOWN: Final = 1.5  #: largest visible part: a byte may cross several links one after another


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors on the times of compute, frames and bytes relative to a price: arrays [draws] by device."""

    compute: Mapping[str, Floats]
    frame: Mapping[str, Floats]
    link: Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class Surface:
    """The price of one request, as the base of an extrapolation."""

    seconds: float
    use: Mapping[str, DeviceUse]  #: work by device
    link_s: Mapping[str, float]  #: time of each device's bytes on its link

    def under(self, factors: Factors) -> Floats:
        """Return the seconds [draws] under other speeds."""
        alone: Any = 0.0
        parallel: Any = 0.0
        alone_s = parallel_s = 0.0
        for name, use in self.use.items():
            if (busy_s := use.compute_s + use.frame_s) <= 0:
                continue
            slower = (use.compute_s * factors.compute[name] + use.frame_s * factors.frame[name]) / busy_s
            alone, alone_s = alone + use.alone_s * slower, alone_s + use.alone_s
            others_s = max(busy_s - use.alone_s, 0.0)
            parallel, parallel_s = np.maximum(parallel, others_s * slower), max(parallel_s, others_s)
        waiting_s = max(self.seconds - alone_s - parallel_s, 0.0)
        before_s = alone_s + parallel_s + waiting_s
        after = alone + parallel + waiting_s + self._more_on_links(factors, waiting_s)
        return np.asarray(self.seconds * after / before_s) if before_s > 0 else np.zeros(1)

    def _more_on_links(self, factors: Factors, waiting_s: float) -> Any:
        """Return the additional waiting seconds [draws] on slower links."""
        if (before := max(self.link_s.values(), default=0.0)) <= 0:
            return 0.0
        more = _most(s * factors.link[name] for name, s in self.link_s.items()) - before
        shown = min(waiting_s / before, MOST_SHOWN)
        return more * np.where(more > 0, (1 - HIDDEN) * shown + HIDDEN * max(shown, 1.0), shown)

    def uneven(self, factors: Factors) -> Floats:
        """Return the imbalance [draws] in seconds: busiest device minus mean, plus busiest link minus mean."""
        excess: Any = 0.0
        busy = [u.compute_s * factors.compute[d] + u.frame_s * factors.frame[d] for d, u in self.use.items()]
        for lanes in (busy, [s * factors.link[d] for d, s in self.link_s.items()]):
            excess = excess + _most(lanes) - sum(lanes) / len(lanes)
        return np.asarray(excess)

    def period(self, factors: Factors) -> Floats:
        """Return the seconds [draws] of work of the busiest device or link for one request."""
        lanes = [u.compute_s * factors.compute[d] + u.frame_s * factors.frame[d] for d, u in self.use.items()]
        return _most([*lanes, *(s * factors.link[d] for d, s in self.link_s.items())])


def _most(several: Iterable[Floats]) -> Floats:
    return np.asarray(reduce(np.maximum, several))


def surfaces(price: Price, plan: Plan, cluster: Cluster) -> list[Surface]:
    """Return the surface of each executable of a plan, priced on a cluster; the first is that of one request.

    The price has the seconds of the first replica only, so the surfaces of the others are valid for `period` alone.
    """
    results = []
    for run in plan.executables:
        use = {device: price.use[device] for device in run.devices if device in price.use}
        link_s = {device: u.sent_bytes / cluster.links[device].up_bytes_per_s for device, u in use.items()}
        results.append(Surface(price.seconds, use, link_s))
    return results


# ----------------------------------------------------------------------------------------------------------------------
# The present estimates, and plans under them.


@dataclass(frozen=True, slots=True)
class Priced:
    """A candidate with the cluster of its price."""

    candidate: Candidate
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Beliefs:
    """The present estimates of devices, links and methods."""

    cluster: Cluster  #: means of devices and links
    draws: Draws  #: draws around the means
    before: Draws | None  #: the means before the present changes, None without changes
    factor: Callable[[Plan], float]  #: measured over predicted time of a plan's method
    sd: Callable[[Plan], float]  #: standard deviation of the factor's logarithm


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected time and cost of a plan under the present estimates."""

    seconds: Floats  #: of one request, [draws]
    cost: Floats  #: in the unit of the objective, [draws]
    mean_s: float  #: seconds of a request at the means
    now_s: float  #: mean_s without the correction of the method
    spread: float  #: standard deviation of the logarithm of the seconds without the correction
    even_s: float  #: mean_s if shares were as balanced as in the price
    before: float | None  #: cost before the present changes, None without changes


def outlook(priced: Priced, beliefs: Beliefs) -> Outlook:
    """Return the expected time and cost of a candidate under the present estimates."""
    plan, price = priced.candidate.plan, priced.candidate.price
    seconds, cost = _under(priced, beliefs.cluster, beliefs.draws)
    rng = np.random.default_rng(crc32(repr(strategy_key(plan)).encode()))  # equal numbers at each call
    off = beliefs.factor(plan) * np.exp(beliefs.sd(plan) * rng.standard_normal(_count(beliefs.draws)))
    now_s = float(_under(priced, beliefs.cluster, NO_DRAWS)[0].mean())
    of_run = surfaces(price, plan, priced.cluster)[0]
    then, now = (factors_of(plan, priced.cluster, c, NO_DRAWS) for c in (priced.cluster, beliefs.cluster))
    more_s = float((of_run.uneven(now) - of_run.uneven(then)).mean())
    even_s = (now_s - min(max(more_s, 0.0), now_s)) * beliefs.factor(plan)
    before = None
    if beliefs.before is not None:
        before = float(_under(priced, beliefs.cluster, beliefs.before)[1].mean())
        before *= 1.0 if price.objective == "memory" else beliefs.factor(plan)
    off_cost = np.full(len(off), float(cost.mean())) if price.objective == "memory" else cost * off
    spread = float(np.log(np.maximum(seconds, 1e-12)).std())
    return Outlook(seconds * off, off_cost, now_s * beliefs.factor(plan), now_s, spread, even_s, before)


def interval(seconds: Floats, noise_sd: float) -> tuple[float, float]:
    """Return the 10th and 90th percentiles of a run's seconds.

    seconds: [draws] of the estimate. noise_sd: standard deviation of the logarithm of a run.
    """
    logs = np.log(np.maximum(seconds, 1e-12))
    off = P90 * float(np.hypot(logs.std(), noise_sd))
    return float(np.exp(logs.mean() - off)), float(np.exp(logs.mean() + off))


P90: Final = 1.2816  #: standard deviations from the mean to the 90th percentile
NO_DRAWS: Final = Draws({}, {}, {}, {})


def _count(draws: Draws) -> int:
    return max((len(each) for each in (*draws.slowdowns.values(), *draws.rates.values())), default=1)


def _under(priced: Priced, now: Cluster, draws: Draws) -> tuple[Floats, Floats]:
    """Return seconds of a request and cost by the objective, [draws], without the correction of the method."""
    plan, price = priced.candidate.plan, priced.candidate.price
    factors = factors_of(plan, priced.cluster, now, draws)
    of_runs = surfaces(price, plan, priced.cluster)
    seconds = of_runs[0].under(factors)
    if price.objective == "latency":
        return seconds, seconds
    if price.objective == "memory":
        return seconds, np.full(len(seconds), price.memory_share)
    same = {device: np.ones(1) for device in plan.devices}
    before, after = (
        1 / sum(1 / np.maximum(s.period(f), 1e-9) for s in of_runs) for f in (Factors(*[same] * 3), factors)
    )
    return seconds, np.asarray(price.expected_period_s / price.correction * after / before)


def factors_of(plan: Plan, then: Cluster, now: Cluster, draws: Draws) -> Factors:
    """Return the factors from the former cluster `then` to draws around the present cluster `now`."""
    compute, frame, link = {}, {}, {}
    for device in plan.devices:
        slower = now.devices[device].slowdown / then.devices[device].slowdown
        compute[device] = slower * np.exp(draws.slowdowns.get(device, _NOTHING))
        costs = [c.devices[device].mesh_frame_cost for c in (then, now)]
        frame[device] = compute[device]
        if plan.route == "mesh" and costs[0] is not None and costs[1] is not None:
            frame[device] = _typical_s(costs[1]) / _typical_s(costs[0]) * np.exp(draws.frames.get(device, _NOTHING))
        link[device] = _link_factor(plan, device, then, now, draws)
    return Factors(compute, frame, link)


_NOTHING: Final = np.zeros(1)


def _typical_s(cost: FrameCost) -> float:
    return max(cost.frame_s + TYPICAL_FRAME_BYTES * cost.byte_s, 1e-12)


def _link_factor(plan: Plan, device: str, then: Cluster, now: Cluster, draws: Draws) -> Floats:
    """Return the factor on the time of a device's bytes, to the peer with the largest factor."""
    own = log(then.links[device].up_bytes_per_s / now.links[device].up_bytes_per_s)
    by_broker = np.exp(own - draws.rates.get(device, _NOTHING))
    if plan.route != "mesh":
        return np.asarray(by_broker)
    factors = [
        np.exp(log(_rate(then, pair) / _rate(now, pair)) - draws.peer_rates.get(pair, _NOTHING))
        for pair in ((device, peer) for peer in plan.devices if peer != device)
        if pair in draws.peer_rates or pair in now.peer_links
    ]
    return _most(factors) if factors else np.asarray(by_broker)


def _rate(cluster: Cluster, pair: tuple[str, str]) -> float:
    link = cluster.peer_links.get(pair)
    own = min(cluster.links[pair[0]].up_bytes_per_s, cluster.links[pair[1]].down_bytes_per_s)
    return own if link is None or link.bytes_per_s is None else link.bytes_per_s
