"""What measurements and runs say of devices, links and methods: each quantity a posterior, with its uncertainty."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import exp, inf, log, sqrt
from statistics import NormalDist, fmean, median_low
from typing import Final, Literal, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from hepti_mqtt.cost.profiles import LOCAL_BYTES_PER_S, FrameCost, Link, PeerLink
from hepti_mqtt.plan import DevicePair, Plan
from hepti_mqtt.planner.quantities import (
    ESTIMATOR,
    ChangeAges,
    Found,
    Noise,
    Posterior,
    Prior,
    Quantity,
    Remaining,
    with_kin,
)
from hepti_mqtt.protocol.messages import Heartbeat, PeerStats

Floats = npt.NDArray[np.float64]

# ----------------------------------------------------------------------------------------------------------------------
# The site: slowdown, frame cost and line of each device, and what is peculiar to each pair.

What = Literal["slowdown", "rate up", "rate down", "pair rate", "round trip", "frame"]
Key = tuple[str, ...]  # a device, or a pair (source, target)
Name = tuple[What, Key]
Means = Mapping[Name, float]  # logarithms
BROKER: Final = ""  # as the target of a pair: frames go there and come back

_PROBED: Final = {"idle": Noise(0.12)}
_CARRIED: Final = {**_PROBED, "exchange": Noise(0.2)}
_LINE: Final = Prior(log(30e6), 2.0, 0.002, _CARRIED)
PRIORS: Final[Mapping[What, Prior]] = {
    "slowdown": Prior(0.0, 0.2, 0.0025, {"run": Noise(0.10), "meter": Noise(0.25, 0.5)}, judge="run"),
    "rate up": _LINE,
    "rate down": _LINE,
    "pair rate": Prior(0.0, 2.0, 0.002, _CARRIED),  # over what the lines of both ends carry
    "round trip": Prior(log(1e-3), 2.0, 0.002, _PROBED),
    "frame": Prior(log(2e-4), 2.0, 0.002, {"fit": Noise(0.25, 0.5)}),
}

TYPICAL_FRAME_BYTES: Final = 1 << 16  # of a frame whose cost is estimated
CONTRADICTED_S: Final = 10.0  # after a run the next ones may contradict a device's meter for so long
UNCLEAR_S: Final = 2.5  # two heartbeats, or a run: a doubt that they have not settled waits for nothing
SPEAKS_S: Final = 3.0  # an overdue run lets meters speak alone for so long
SHARED_LINK: Final = 0.2  # weight of a first probe that may have shared its link with exchanges or loads
LEAST_TIMED_BYTES: Final = 1 << 15  # of exchanges whose rate says something ...
LEAST_TIMED_US: Final = 2000  # ... and their time
SHARING: Final = 2.0  # links that exchanges share carry each of them at most by this factor more slowly
FRESH_S: Final = 5.0  # a pair that carried nothing for so long says nothing of the lines of its ends
OF_PAIR: Final = 0.25  # weight of a rate for its pair: that the line of one end has changed is more likely
AS_MEASURED: Final = 1.0  # what a meter says that has seen nothing
REBASED: Final = 4  # exchanges of a plan that say how it shares links
LIE: Final = log(1.5)  # a meter or a probe that is further off is named
# Logarithms by which a mean must have moved, and two standard deviations, before another plan may be better.
MOVED: Final[Mapping[What, float]] = {
    "slowdown": log(1.3),
    "rate up": log(1.3),
    "rate down": log(1.3),
    "pair rate": log(1.3),
    "frame": log(1.6),
}
DRAWS: Final = 48
# Equally probable numbers of a normal distribution: draws are these in another order for each quantity.
_QUANTILES: Final = np.array([NormalDist().inv_cdf((i + 0.5) / DRAWS) for i in range(DRAWS)])
_SPREAD: Final = np.arange(DRAWS) * 7 % DRAWS  # the draws in an order in which the first ones are of all sizes
_NOTHING: Final = np.zeros(1)


@dataclass(slots=True)
class _Device:
    """What is remembered of a device beside its quantities.

    kind: what devices share that are taken to be equal. assumed: the cost of frames before it has met some. frame_cost:
    the last one that it reported; its ratio of bytes to frames counts. meters: readings since its last run. sharers:
    exchanges of its plan that may share its link at a time. timed: bytes and microseconds of exchanges, by peer, when
    they last said enough. last_run_s, overdue_s: of its last run, and of the last sign of an overdue one. seen: the
    last readings.
    """

    kind: str
    assumed: FrameCost | None = None
    frame_cost: FrameCost | None = None
    meters: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    sharers: int = 1
    timed: dict[str, tuple[int, int]] = field(default_factory=dict)
    last_run_s: float = -inf
    overdue_s: float = -inf
    seen: dict[str, float | None] = field(default_factory=dict)

    def news(self, name: str, value: float | None) -> float | None:
        """Return a reading if it is another than the last: meters repeat what they have until there is more."""
        before, self.seen[name] = self.seen.get(name), value
        return value if value is not None and value > 0 and value != before else None


@dataclass(frozen=True, slots=True)
class Draws:
    """Logarithms of factors on the means, arrays [count] by device or by pair; what was not measured has none.

    Equal names and seeds give equal numbers, so that plans are compared under the same draws.
    """

    slowdowns: Mapping[str, Floats] = field(default_factory=dict)
    rates: Mapping[str, Floats] = field(default_factory=dict)
    frames: Mapping[str, Floats] = field(default_factory=dict)
    peer_rates: Mapping[DevicePair, Floats] = field(default_factory=dict)


class YoungestChange(NamedTuple):
    """What remains of the youngest change, and the means before the changes of now as draws [1]."""

    remaining: Remaining
    before: Draws


class SiteEstimates:
    """What is believed of the devices and links of one site; `now` by any one clock, in seconds."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._quantities: dict[Name, Quantity] = {}
        self._read: tuple[float, dict[Name, Posterior]] | None = None  # until there is more
        self._carried: dict[tuple[bool, Key], tuple[float, float]] = {}  # (probed, pair): last rate, and when
        self._best: dict[tuple[bool, Name], float] = {}  # (probed, line): the best of its pairs, as last taken
        self._now = 0.0  # when there was last evidence
        self._ages = ChangeAges()
        self.last_change_s = -inf  # when the last change was found, or found to have ended
        self.last_change_began_s = -inf  # when the last one that was found began

    def add_device(self, name: str, kind: str = "", assumed: FrameCost | None = None) -> None:
        """Know a device and its kind: devices of one kind are taken to be equal until they show otherwise.

        assumed: cost of frames off loopback before it has met some; its link is taken for one of the prior's rate
        until it is measured. None: it has no such peers.
        """
        device = self._devices.setdefault(name, _Device(kind))
        device.kind, device.assumed, self._read = kind, assumed, None

    def forget_device(self, name: str) -> None:
        """Forget a device: it has started again, or its place is needed."""
        self._devices.pop(name, None)
        for found in [found for found in self._quantities if name in found[1]]:
            del self._quantities[found]
        self._carried = {(probed, key): x for (probed, key), x in self._carried.items() if name not in key}
        self._read = None

    def has_link(self, name: str) -> bool:
        """Return whether a link is between a device and its peers: it has an endpoint off its own machine."""
        device = self._devices.get(name)
        return device is not None and device.assumed is not None

    # -- evidence -------------------------------------------------------------------------------------------------

    def record_heartbeat(self, name: str, heartbeat: Heartbeat, now: float, *, busy: bool, loading: bool) -> None:
        """Take what a device says of itself.

        busy: it has a part in a run. loading: it, or one that it works with, loads weights.
        """
        device = self._devices.get(name)
        if device is None:
            return
        self._now = now
        said = None if heartbeat.slowdown == AS_MEASURED or loading else heartbeat.slowdown
        if (slowdown := device.news("slowdown", said)) is not None:
            judged = busy or now - device.last_run_s < CONTRADICTED_S
            alone = not judged or now - device.overdue_s < SPEAKS_S
            device.meters.append(log(slowdown))
            self._observe("slowdown", (name,), log(slowdown), "meter", 1.0, now, alone)
        if heartbeat.peer_frame_s is not None and heartbeat.peer_byte_s is not None and not loading:
            cost = FrameCost(heartbeat.peer_frame_s, heartbeat.peer_byte_s)
            if (seconds := device.news("frame", _typical_s(cost))) is not None:
                device.frame_cost = cost
                self._observe("frame", (name,), log(seconds), "fit", 1.0, now)
        self._record_edges(name, device, heartbeat.edges, now, loading=loading)
        probed: dict[str, tuple[float | None, float | None]] = {
            BROKER: (heartbeat.round_trip_s, heartbeat.bandwidth_bytes_per_s)
        }
        probed |= {peer: told for peer, told in heartbeat.peers.items() if peer != name and peer in self._devices}
        is_shared = busy or loading  # then exchanges say more than probes of a link that was measured
        weight = SHARED_LINK if is_shared else 1.0
        for peer, (round_trip_s, bytes_per_s) in probed.items():
            key = (name, peer)
            seconds, rate = device.news(f"round trip {peer}", round_trip_s), device.news(f"rate {peer}", bytes_per_s)
            # Work of a device only adds to a round trip, so a shorter one counts at any time.
            if seconds is not None and (not is_shared or seconds < self._round_trip_s(name, peer)):
                self._observe("round trip", _ends(name, peer), log(seconds), "idle", weight, now)
            # Tiles share the link, and what they leave says nothing of the rate that runs will have.
            if rate is not None and not loading and not (is_shared and ("pair rate", key) in self._quantities):
                self._record_rate(key, _log_rate(rate), "idle", weight, now)

    def record_compute(self, name: str, log_ratio: float, now: float, weight: float = 1.0) -> None:
        """Take a device's compute time of a whole run over its price at slowdown 1: the strongest evidence.

        What its meter said meanwhile shows how far that is off.
        """
        device = self._devices.get(name)
        if device is None:
            return
        found = self._observe("slowdown", (name,), log_ratio, "run", weight, now)
        if device.meters and weight >= 0.8 and found is None:
            meter = self._quantities["slowdown", (name,)].streams["meter"]
            meter.learn_offset(median_low(device.meters) - log_ratio)
        device.meters.clear()
        device.last_run_s = now

    def record_edge(self, source: str, target: str, bytes_per_s: float, now: float) -> None:
        """Take the rate at which exchanges came straight from one device to another, while nothing else held them up.

        Nothing is learned of a pair that was not probed: there is no link between what sits on one machine. Exchanges
        share links. How they do is learned from the first ones since `begin_plan`; from then on only what differs from
        these counts, and what no sharing explains.
        """
        key = (source, target)
        known, carries = self._quantities.get(("pair rate", key)), self._carries(key)
        if known is None or carries is None or bytes_per_s <= 0:
            return
        value, stream = _log_rate(bytes_per_s), known.streams["exchange"]
        most_shared = log(SHARING * max(self._devices[source].sharers, self._devices[target].sharers))
        if stream.offset_count < REBASED:
            gap = min(max(value - carries, -most_shared), 0.0)
            stream.offset += (gap - stream.offset) / (stream.offset_count + 1)
            stream.offset_count += 1
        if (probed := self._carried.get((True, key))) is not None:  # a probe that no sharing explains is wrong
            for name in _PROBED:
                known.streams[name].learn_offset(max(probed[0] - value - most_shared, 0.0))
        self._record_rate(key, value, "exchange", 1.0, now)

    def _record_rate(self, key: Key, value: float, stream: str, weight: float, now: float) -> None:
        """Take what a pair carries: a line carries as much as the best of its pairs that other lines do not hold up.

        So a host whose line falls is seen on all of its pairs, and the others on the pairs among themselves. What the
        lines do not explain is the pair's own.
        """
        pair, probed = self._quantity("pair rate", key, now), stream != "exchange"
        self._carried[probed, key] = value, now
        for line in _lines(key):
            own, best = self._quantities.get(line), -inf
            for (of_probes, other), (carried, at_s) in self._carried.items():
                if of_probes is not probed or line not in _lines(other) or now - at_s > FRESH_S:
                    continue
                carried -= self._quantities["pair rate", other].streams[stream].offset
                slowest = min(
                    (x.mean for far in _lines(other) if far != line and (x := self._quantities.get(far))), default=inf
                )
                if own is None or carried > own.mean or slowest > own.mean - ESTIMATOR.same:
                    best = max(best, carried)
            if best > -inf and best != self._best.get((probed, line)):
                self._best[probed, line] = best
                self._observe(*line, best, stream, weight, now)
        lines = min(self._quantities[line].mean for line in _lines(key) if line in self._quantities)
        pair.observe(value - lines, stream, OF_PAIR * weight, now)

    def _record_edges(
        self, name: str, device: _Device, edges: Mapping[str, PeerStats], now: float, *, loading: bool
    ) -> None:
        """Take what came from peers since the last heartbeat, where that says enough; tiles say nothing."""
        for peer, told in edges.items():
            nbytes, us = device.timed.get(peer, (told.timed_bytes, told.timed_us))
            more, more_us = told.timed_bytes - nbytes, told.timed_us - us
            if 0 <= more < LEAST_TIMED_BYTES or 0 <= more_us < LEAST_TIMED_US:
                device.timed.setdefault(peer, (nbytes, us))
                continue
            device.timed[peer] = (told.timed_bytes, told.timed_us)
            if more > 0 and more_us > 0 and not loading:
                self.record_edge(peer, name, 1e6 * more / more_us, now)

    def begin_plan(self, names: Collection[str]) -> None:
        """Know that devices serve another plan now, whose exchanges share links in another way."""
        for name in names:
            if (device := self._devices.get(name)) is not None:
                device.sharers = max(len(names) - 1, 1)
        for (what, key), quantity in self._quantities.items():
            if what == "pair rate" and set(key) <= set(names):
                stream = quantity.streams["exchange"]
                stream.offset, stream.offset_count = 0.0, 0
                self._carried.pop((False, key), None)

    def record_overdue(self, names: Iterable[str], now: float) -> None:
        """Know that a run of these devices takes much longer than it should: their meters may speak alone."""
        for name in names:
            if (device := self._devices.get(name)) is not None:
                device.overdue_s = now

    def _observe(
        self, what: What, key: Key, value: float, stream: str, weight: float, now: float, alone: bool = False
    ) -> Found | None:
        quantity = self._quantity(what, key, now)
        self._read, self._now = None, now
        found = quantity.observe(value, stream, weight, now, alone=alone)
        if found is not None:
            self.last_change_s = now
        if found == "changed":
            self.last_change_began_s = quantity.changes[-1].began_s
        return found

    def _quantity(self, what: What, key: Key, now: float) -> Quantity:
        """Return a quantity; one that is new is known by its prior."""
        if (what, key) not in self._quantities:
            self._quantities[what, key] = Quantity(PRIORS[what], now, self._ages)
            self._read = None
        return self._quantities[what, key]

    # -- means ----------------------------------------------------------------------------------------------------

    def slowdown(self, name: str) -> float:
        """Return the mean slowdown of a device, 1 for one that has told nothing."""
        return self._exp_mean("slowdown", (name,), 1.0)

    def link(self, name: str) -> Link:
        """Return the mean link of a device to the broker, with defaults for what was not measured."""
        device = self._devices.get(name)
        default = Link().up_bytes_per_s if device is None or device.assumed is None else exp(_LINE.mean)
        bytes_per_s = self._bytes_per_s((name, BROKER)) or default
        round_trip_s = self._exp_mean("round trip", (name, BROKER), 2 * Link().latency_s)
        return Link(round_trip_s / 2, bytes_per_s, bytes_per_s)

    def peer_link(self, source: str, target: str) -> PeerLink:
        """Return the mean link from one device straight to another.

        Before it was probed its latency is the prior's, or less if the broker answers both ends sooner: round trips to
        the broker include the work of a machine that is not on the way.
        """
        return PeerLink(self._round_trip_s(source, target) / 2, self._bytes_per_s((source, target)))

    def _round_trip_s(self, source: str, target: str) -> float:
        if target == BROKER:
            return self._exp_mean("round trip", (source, BROKER), inf)
        by_broker_s = 2 * (self.link(source).latency_s + self.link(target).latency_s)
        return self._exp_mean("round trip", _ends(source, target), min(by_broker_s, exp(PRIORS["round trip"].mean)))

    def peer_links(self, source: str) -> dict[str, PeerLink]:
        """Return the mean links of a device straight to others, without those that the other end alone has probed."""
        targets = [
            target
            for target in sorted(self._devices)
            if self._has_probed(source, target)
            or (self.has_link(source) and self.has_link(target) and not self._has_probed(target, source))
        ]
        return {target: self.peer_link(source, target) for target in targets if target != source}

    def _has_probed(self, source: str, target: str) -> bool:
        device = self._devices.get(source)
        return device is not None and device.seen.get(f"round trip {target}") is not None

    def _bytes_per_s(self, key: Key) -> float | None:
        """Return the mean rate of a pair, None before it was measured."""
        carries = self._carries(key, kin=True) if ("pair rate", key) in self._quantities else None
        return None if carries is None else exp(carries)

    def _carries(self, key: Key, *, kin: bool = False) -> float | None:
        """Return the logarithm of what a pair carries; kin: with what devices of a kind say of each other."""

        def mean(name: Name) -> float:
            return self._posterior(*name)[0] if kin else self._quantities[name].mean

        lines = [mean(line) for line in _lines(key) if line in self._quantities]
        own = mean(("pair rate", key)) if ("pair rate", key) in self._quantities else 0.0
        return min(lines) + own if lines else None

    def frame_cost(self, name: str) -> FrameCost | None:
        """Return the mean cost of frames off loopback on a device; None before it has met some."""
        device = self._devices.get(name)
        if device is None or device.frame_cost is None:
            return None
        factor = self._exp_mean("frame", (name,), 0.0) / _typical_s(device.frame_cost)
        return FrameCost(factor * device.frame_cost.frame_s, factor * device.frame_cost.byte_s)

    def _exp_mean(self, what: What, key: Key, instead: float) -> float:
        return exp(self._posterior(what, key)[0]) if (what, key) in self._quantities else instead

    def _posterior(self, what: What, key: Key, now: float | None = None) -> Posterior:
        """Return mean and variance of a quantity that is known, with what its kin say; now or at the last evidence."""
        now = self._now if now is None else now
        if self._read is None or self._read[0] != now:
            kinds: dict[Name, list[Name]] = {}
            for found in self._quantities:
                kind = tuple(self._devices[name].kind if name in self._devices else name for name in found[1])
                kinds.setdefault((found[0], kind), []).append(found)
            self._read = now, {}
            for kin in kinds.values():
                self._read[1].update(zip(kin, with_kin([self._quantities[k] for k in kin], now), strict=True))
        return self._read[1][what, key]

    # -- uncertainty and change -----------------------------------------------------------------------------------

    def draws(self, names: Collection[str], now: float, count: int = DRAWS, seed: int = 0) -> Draws:
        """Return draws of what is believed of devices and of the pairs among them; at most `DRAWS` of each."""

        return self._shifted({found: self._drawn(found, now, seed)[:count] for found in self._among(names)})

    def _drawn(self, found: Name, now: float, seed: int) -> Floats:
        """Return draws of a quantity around its mean; a change of which nothing is heard may have ended, or not."""
        order = np.random.default_rng([seed, crc32(repr(found).encode())]).permutation(DRAWS)
        draws, quantity = sqrt(self._posterior(*found, now)[1]) * _QUANTILES, self._quantities[found]
        if (ended := quantity.ended_unheard(now)) > 0:
            apart = quantity.mean - quantity.changes[-1].mean
            some = round(DRAWS * min(ended, 1 - ended))
            draws = draws.copy()
            draws[_SPREAD[:some]] += apart if ended > 0.5 else -apart
        return np.asarray(draws[order])

    def _shifted(self, arrays: Mapping[Name, Floats]) -> Draws:
        """Return draws of what plans depend on, from arrays of how far quantities are from their means."""

        def of(what: What) -> dict[str, Floats]:
            return {key[0]: array for (found, key), array in arrays.items() if found == what}

        rates: dict[Key, Floats] = {}
        for what, key in self._quantities:
            names = [("pair rate", key), *_lines(key)] if what == "pair rate" else []
            if not any(name in arrays for name in names):
                continue
            lines = [
                (self._posterior(*line)[0], arrays.get(line, _NOTHING))
                for line in names[1:]
                if line in self._quantities
            ]
            least = min(mean for mean, _ in lines)
            shifted = reduce(np.minimum, [mean - least + array for mean, array in lines])
            rates[key] = shifted + arrays.get(("pair rate", key), _NOTHING)
        by_broker = {source: array for (source, target), array in rates.items() if target == BROKER}
        peers = {(s, t): array for (s, t), array in rates.items() if t != BROKER}
        return Draws(of("slowdown"), by_broker, of("frame"), peers)

    def youngest_change(self, names: Collection[str], now: float) -> YoungestChange | None:
        """Return what remains of the youngest change of these devices and their links, and what was before; or None."""
        known = ((found, self._quantities[found]) for found in self._among(names))
        changed = {found: x for found, x in known if x.ended_unheard(now) <= 0.5 and x.changes_since(now)}
        if not changed:
            return None
        youngest = max(changed.values(), key=lambda x: x.changes[-1].began_s)
        before = {found: np.array([x.changes_since(now)[0].mean - x.mean]) for found, x in changed.items()}
        remaining = youngest.remaining(now)
        assert remaining is not None
        return YoungestChange(remaining, self._shifted(before))

    def unheard_s(self, names: Collection[str], now: float) -> float:
        """Return for how long nothing was heard of one of these devices whose slowdown had changed, 0 without one."""
        known = [x for name in names if (x := self._quantities.get(("slowdown", (name,)))) and x.changes]
        return max((now - x.at_s for x in known), default=0.0)

    def _among(self, names: Collection[str]) -> list[Name]:
        there = {*names, BROKER}
        return [found for found in self._quantities if there.issuperset(found[1])]

    def means(self) -> dict[Name, float]:
        """Return the mean logarithm of every quantity: what a plan is made with that is made now."""
        met = {found: self._posterior(*found)[0] for found in self._quantities}
        assumed = {name: device.assumed for name, device in self._devices.items() if device.assumed is not None}
        unmet: dict[Name, float] = {("frame", (n,)): log(_typical_s(cost)) for n, cost in assumed.items()}
        lines = {line: _LINE.mean for name in assumed for line in _lines((name, BROKER))}
        return {**unmet, **lines, **met}

    def is_unclear(self, names: Collection[str], now: float) -> bool:
        """Return whether the slowdown of one of these devices may be changing: the next run, or heartbeats, tell."""
        known = [x for name in names if (x := self._quantities.get(("slowdown", (name,))))]
        return any(x.is_in_doubt and now - x.doubted_s < UNCLEAR_S for x in known)

    def in_doubt(self, names: Collection[str], since_s: float) -> bool:
        """Return whether something of these devices, or of links between them, has changed since, or may do so now."""
        known = [self._quantities[found] for found in self._among(names)]
        return any(x.is_in_doubt or (x.changes and x.changes[-1].began_s > since_s) for x in known)

    def moved(self, made_with: Means, used: Collection[str], now: float) -> str | None:
        """Return in words what is no longer as a plan was made with, or None.

        used: the devices of the plan; of others only what has become better counts. What was not measured then is held
        against the defaults of a link and of a slowdown.
        """
        for what, key in self._quantities:
            if what not in MOVED:  # round trips beside runs are those of a busy device
                continue
            mean, variance = self._posterior(what, key, now)
            then = made_with.get((what, key), _DEFAULTS.get(what, mean))
            off = mean - then
            better = off > 0 if what in ("rate up", "rate down", "pair rate") else off < 0
            if abs(off) > max(MOVED[what], 2 * sqrt(variance)) and (better or {*used, BROKER}.issuperset(key)):
                return f"{_whose(what, key)} is {exp(off):.2f} times what the plan was made for"
        return None

    def describe(self, now: float) -> dict[str, tuple[str, ...]]:
        """Return the evidence on each device in sentences; whose meter or probe is contradicted is named first."""
        return {name: (*self.contradicted(name), *self._evidence(name, now)) for name in self._devices}

    def contradicted(self, name: str) -> Iterator[str]:
        """Yield in words what a device says that its runs, or exchanges with it, contradict."""
        for (what, key), quantity in self._quantities.items():
            if key[0] != name:
                continue
            meter = quantity.streams.get("meter")
            if meter is not None and abs(meter.offset) > LIE:
                said, ran = exp(quantity.mean + meter.offset), exp(quantity.mean)
                yield f"{name} contradicts itself: its meter says slowdown {said:.2f}, its runs say {ran:.2f}"
            if what != "pair rate" or not quantity.streams["exchange"].count or (carries := self._carries(key)) is None:
                continue
            probed = self._carried.get((True, key), (-inf, 0.0))[0]
            if probed - carries > LIE:
                says, carried = exp(probed) / 1e6, exp(carries) / 1e6
                yield f"probes from {name} to {key[-1]} say {says:.1f} MB/s, exchanges say {carried:.1f} MB/s"

    def _evidence(self, name: str, now: float) -> Iterator[str]:
        for what, key in self._quantities:
            if key[0] != name:
                continue
            quantity, (mean, variance) = self._quantities[what, key], self._posterior(what, key, now)
            whose = what if len(key) == 1 else f"{what} to {key[1] or 'the broker'}"
            seen = ", ".join(f"{s.count} of {stream}" for stream, s in quantity.streams.items() if s.count)
            factor, unit = _UNITS[what]
            yield f"{whose} {factor * exp(mean):.3g}{unit} ± {sqrt(variance):.0%} ({seen})"
            if (open_changes := quantity.changes_since(now)) and (remaining := quantity.remaining(now)):
                last = open_changes[-1]
                yield (
                    f"{whose} was {factor * exp(last.mean):.3g}{unit} until {now - last.began_s:.0f} s ago; the change "
                    f"lasts about {remaining.median_s:.0f} s more"
                )


_UNITS: Final[Mapping[What, tuple[float, str]]] = {
    "slowdown": (1.0, ""),
    "rate up": (1e-6, " MB/s"),
    "rate down": (1e-6, " MB/s"),
    "pair rate": (1.0, " of its lines"),
    "round trip": (1e3, " ms"),
    "frame": (1e3, " ms"),
}
# What plans are made with where nothing was measured.
_DEFAULTS: Final[Mapping[What, float]] = {
    "slowdown": 0.0,
    "rate up": log(LOCAL_BYTES_PER_S),
    "rate down": log(LOCAL_BYTES_PER_S),
}


def _lines(key: Key) -> tuple[Name, ...]:
    """Return the lines that bytes of a pair pass."""
    source, target = key
    there: tuple[Name, ...] = (("rate up", (source,)), ("rate down", (target,)))
    return (*there, ("rate down", (source,))) if target == BROKER else there


def _ends(source: str, target: str) -> Key:
    """Return the key of a round trip: peers that probe each other measure the same one."""
    return (source, target) if BROKER in (source, target) else (min(source, target), max(source, target))


def _whose(what: What, key: Key) -> str:
    name, *peer = (x or "the broker" for x in key)
    return f"{what} from {name} to {peer[0]}" if peer else f"{what} of {name}"


def _typical_s(cost: FrameCost) -> float:
    return cost.frame_s + TYPICAL_FRAME_BYTES * cost.byte_s


def _log_rate(bytes_per_s: float) -> float:
    """Return the logarithm of a rate; what is much faster than any link is noise."""
    return log(min(bytes_per_s, 4 * LOCAL_BYTES_PER_S))


# ----------------------------------------------------------------------------------------------------------------------
# Methods: what whole runs take over their price.

# A way of dividing a model: method, number of devices and of replicas (0: not side by side), wire, storage and route.
StrategyKey = tuple[str, int, int, str, str, str]

RUN: Final = {"run": Noise(0.08)}
METHOD_DRIFT: Final = 0.002
SINGLE_SD: Final = 0.06  # of one device, which exchanges nothing
FIRST_SD: Final = 0.2  # of the first method of several devices
METHOD_SD: Final = 0.10  # by which methods differ beyond what they share
NUMBER_SD: Final = 0.05  # the same for one method on another number of devices
SURPRISED: Final = 0.15  # weight of a run while something else may have changed


def strategy_key(plan: Plan) -> StrategyKey:
    """Return what runs under a plan teach about."""
    return plan.method, len(plan.devices), len(plan.replicas), plan.wire, plan.weight_dtype, plan.route


def _exchanges(key: StrategyKey) -> bool:
    return key[1] > 1 and not key[2]


@dataclass(frozen=True, slots=True)
class Corrections:
    """Measured over predicted time by way of dividing a model, as `price` reads it; sds: of the logarithms."""

    factors: Mapping[StrategyKey, float] = field(default_factory=dict)
    sds: Mapping[StrategyKey, float] = field(default_factory=dict)

    def factor(self, plan: Plan) -> float:
        """Return what to multiply a plan's predicted time by.

        A way of several devices that was never used is taken to be as far off as the same method on another number of
        them, or as those that were used: what they share, links and stalls, is what the simulator misses. One
        device alone has no exchanges: 1. Replicas that were never
        used are as far off as their plans are by themselves.
        """
        known = self.factors.get(strategy_key(plan))
        if known is not None:
            return known
        if plan.replicas:
            return exp(fmean(log(self.factor(replica)) for replica in plan.replicas))
        near, _ = self._near(strategy_key(plan))
        return exp(fmean(log(self.factors[key]) for key in near)) if near and len(plan.devices) > 1 else 1.0

    def sd(self, plan: Plan) -> float:
        """Return how far the logarithm of that factor may be off."""
        known = self.sds.get(strategy_key(plan))
        if known is not None:
            return known
        if plan.replicas:
            return max(self.sd(replica) for replica in plan.replicas)
        if len(plan.devices) == 1:
            return SINGLE_SD
        near, apart = self._near(strategy_key(plan))
        return sqrt(apart**2 + fmean(self.sds[key] ** 2 for key in near)) if near else FIRST_SD

    def _near(self, key: StrategyKey) -> tuple[list[StrategyKey], float]:
        """Return the ways of several devices that say most of one that was never used, and how far it is from them."""
        used = [other for other in self.factors if _exchanges(other)]
        same = [other for other in used if (other[0], other[3:]) == (key[0], key[3:])]
        return (same, NUMBER_SD) if same else (used, METHOD_SD)


class MethodEstimates:
    """What whole runs of one model take over their price, by way of dividing it."""

    def __init__(self) -> None:
        self._ways: dict[StrategyKey, Quantity] = {}

    def record_run(
        self,
        plan: Plan,
        tokens: int,
        seconds: float,
        now: float,
        spread: float = 0.0,
        weight: float = 1.0,
        whole: Plan | None = None,
    ) -> Found | None:
        """Take the measured time of a run of `tokens` tokens that had the devices to itself.

        spread: standard deviation of the logarithm of its price, for what is not known of devices and links. whole: the
        plan of which `plan` is a replica. It teaches about that alone: the same division without others beside it need
        not be as slow.
        """
        if plan.predicted_s <= 0 or plan.predicted_tokens <= 0 or not 0.8 < tokens / plan.predicted_tokens < 1.25:
            return None  # the time of another length is not in proportion
        ratio = seconds / (plan.predicted_s * tokens / plan.predicted_tokens)
        if not 0 < ratio < inf:
            return None
        key = strategy_key(whole or plan)
        if key not in self._ways:
            known = self.corrections(now)
            prior = Prior(log(known.factor(whole or plan)), known.sd(whole or plan), METHOD_DRIFT, RUN)
            self._ways[key] = Quantity(prior, now)
        return self._ways[key].observe(log(ratio), "run", weight, now, extra_variance=spread**2)

    def undo_since(self, since_s: float) -> None:
        """Take back the changes since then: it was a device or a link that had changed."""
        for quantity in self._ways.values():
            quantity.undo_since(since_s)

    def factor(self, plan: Plan) -> float:
        """Return what to multiply a plan's predicted time by."""
        return self.corrections().factor(plan)

    def sd(self, plan: Plan, now: float | None = None) -> float:
        """Return how far the logarithm of that factor may be off."""
        return self.corrections(now).sd(plan)

    def run_sd(self, plan: Plan) -> float:
        """Return by how much the logarithm of one run's time differs from that of another."""
        known = self._ways.get(strategy_key(plan))
        return RUN["run"].sd if known is None else sqrt(known.streams["run"].variance)

    def runs(self, plan: Plan) -> int:
        """Return how many runs have taught a plan's way."""
        known = self._ways.get(strategy_key(plan))
        return 0 if known is None else known.count

    def corrections(self, now: float | None = None) -> Corrections:
        """Return what is believed now, as `price` reads it."""
        ways = self._ways.items()
        return Corrections({k: exp(x.mean) for k, x in ways}, {k: x.sd(now) for k, x in ways})
