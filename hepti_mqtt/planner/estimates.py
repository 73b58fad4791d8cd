"""Estimates of devices, links and methods, from measurements and runs: a posterior for each quantity."""

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

from hepti_mqtt.core.plan import DevicePair, Plan
from hepti_mqtt.core.profiles import LOCAL_BYTES_PER_S, FrameCost, Link, PeerLink
from hepti_mqtt.planner.quantities import (
    ESTIMATOR,
    ChangeAges,
    ChangeEvent,
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
# The site: slowdown, frame cost and line of each device, and the rate of each pair relative to its lines.

What = Literal["slowdown", "rate up", "rate down", "pair rate", "round trip", "frame"]
Key = tuple[str, ...]  # a device, or a pair (source, target)
Name = tuple[What, Key]
Means = Mapping[Name, float]  # logarithms
BROKER: Final = ""  #: target of a pair: frames go to the broker and return

_PROBED: Final = {"idle": Noise(0.12)}
_CARRIED: Final = {**_PROBED, "exchange": Noise(0.2)}
_LINE: Final = Prior(log(30e6), 2.0, 0.002, _CARRIED)
_RELATIVE: Final = Prior(0.0, 2.0, 0.002, _CARRIED)  # to the lines of both ends
_SLOWDOWN: Final = Prior(0.0, 0.2, 0.0025, {"run": Noise(0.10), "meter": Noise(0.25, 0.5)}, judge="run")


class QuantitySpec(NamedTuple):
    """What is assumed of one kind of quantity; values are logarithms."""

    prior: Prior
    moved: float = inf  #: a plan may lose its lead after a mean has moved by this, and by two standard deviations
    assumed: float | None = None  #: value that plans expect if it is unmeasured, None: its mean
    factor: float = 1.0  #: on its value for people
    unit: str = ""


QUANTITIES: Final[Mapping[What, QuantitySpec]] = {
    "slowdown": QuantitySpec(_SLOWDOWN, log(1.3), 0.0),
    "rate up": QuantitySpec(_LINE, log(1.3), log(LOCAL_BYTES_PER_S), 1e-6, " MB/s"),
    "rate down": QuantitySpec(_LINE, log(1.3), log(LOCAL_BYTES_PER_S), 1e-6, " MB/s"),
    "pair rate": QuantitySpec(_RELATIVE, log(1.3), unit=" of its lines"),
    # During runs it measures a busy device, so plans do not lose their lead by it.
    "round trip": QuantitySpec(Prior(log(1e-3), 2.0, 0.002, _PROBED), factor=1e3, unit=" ms"),
    "frame": QuantitySpec(Prior(log(2e-4), 2.0, 0.002, {"fit": Noise(0.25, 0.5)}), log(1.6), factor=1e3, unit=" ms"),
}

TYPICAL_FRAME_BYTES: Final = 1 << 16  #: size of the frame that "frame" is the cost of
CONTRADICTED_S: Final = 10.0  #: time after a run in which the next run may contradict the device's meter
UNCLEAR_S: Final = 2.5  #: longest wait until a run or two heartbeats settle a doubt
SPEAKS_S: Final = 3.0  #: time after an overdue run in which meters may detect a change without a run
SHARED_LINK: Final = 0.2  #: weight of a first probe that may have shared its link with exchanges or loads
LEAST_TIMED_BYTES: Final = 1 << 15  #: least bytes of the exchanges that a rate is measured from
LEAST_TIMED_US: Final = 2000  #: least time of the exchanges that a rate is measured from
SHARING: Final = 2.0  #: longest time of an exchange on a shared link, relative to the link alone
FRESH_S: Final = 5.0  #: oldest rate of a pair that counts for the lines of its ends
OF_PAIR: Final = 0.25  #: weight of a rate for its pair: a change of one end's line is more likely
AS_MEASURED: Final = 1.0  #: slowdown that a meter reports before its first measurement
REBASED: Final = 4  #: exchanges of a plan that measure how it shares links
LIE: Final = log(1.5)  #: an offset of a meter or a probe beyond this is reported
DRAWS: Final = 48
# Equally probable quantiles of the normal distribution; the draws of each quantity are a permutation of them.
_QUANTILES: Final = np.array([NormalDist().inv_cdf((i + 0.5) / DRAWS) for i in range(DRAWS)])
_SPREAD: Final = np.arange(DRAWS) * 7 % DRAWS  # order of the draws in which every prefix covers the distribution
_NOTHING: Final = np.zeros(1)


@dataclass(slots=True)
class _Device:
    """State of a device besides its quantities."""

    kind: str  #: devices of one kind are assumed to be equal
    assumed: FrameCost | None = None  #: cost of frames until the device measures it
    frame_cost: FrameCost | None = None  #: the last reported cost; only its ratio of bytes to frames counts
    #: Logarithms of the meter's readings since the device's last run.
    meters: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    sharers: int = 1  #: exchanges of its plan that may share its link at a time
    #: Bytes and microseconds of the exchanges of each peer at the last measured rate.
    timed: dict[str, tuple[int, int]] = field(default_factory=dict)
    last_run_s: float = -inf
    overdue_s: float = -inf  #: time of the last overdue run
    readings: dict[str, float | None] = field(default_factory=dict)  #: the last reading of each meter

    def news(self, name: str, value: float | None) -> float | None:
        """Return a reading if it differs from the last one: meters repeat a reading until the next measurement."""
        before, self.readings[name] = self.readings.get(name), value
        return value if value is not None and value > 0 and value != before else None


@dataclass(frozen=True, slots=True)
class Draws:
    """Logarithms of factors on the means, arrays [draws] by device or pair; unmeasured quantities are missing.

    Equal names and seeds give equal numbers, so plans are compared under the same draws.
    """

    slowdowns: Mapping[str, Floats] = field(default_factory=dict)
    rates: Mapping[str, Floats] = field(default_factory=dict)
    frames: Mapping[str, Floats] = field(default_factory=dict)
    peer_rates: Mapping[DevicePair, Floats] = field(default_factory=dict)


class YoungestChange(NamedTuple):
    """The youngest change of some devices and links."""

    remaining: Remaining  #: its remaining time
    before: Draws  #: the means before all present changes, as draws [1]


class SiteEstimates:
    """Posteriors of the devices and links of one site; all calls take `now` from the same clock, in seconds."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._quantities: dict[Name, Quantity] = {}
        self._read: tuple[float, dict[Name, Posterior]] | None = None  # cached until the next evidence
        self._carried: dict[tuple[bool, Key], tuple[float, float]] = {}  # (probed, pair): last rate and its time
        self._best: dict[tuple[bool, Name], float] = {}  # (probed, line): last observed rate of its best pair
        self._now = 0.0  # time of the last evidence
        self._ages = ChangeAges()
        self.last_change_s = -inf  #: time of the last detection of a change's begin or end
        self.last_change_began_s = -inf  #: begin of the last detected change

    def add_device(self, name: str, kind: str = "", assumed: FrameCost | None = None) -> None:
        """Add a device; devices of one kind are assumed to be equal until measurements differ.

        assumed: cost of frames to other machines until the device measures it; its link has the prior's rate until
        then. None: the device has no peers on other machines.
        """
        device = self._devices.setdefault(name, _Device(kind))
        device.kind, device.assumed, self._read = kind, assumed, None

    def forget_device(self, name: str) -> None:
        """Drop a device's estimates: it has restarted, or the site has too many devices."""
        self._devices.pop(name, None)
        for entry in [entry for entry in self._quantities if name in entry[1]]:
            del self._quantities[entry]
        self._carried = {(probed, key): x for (probed, key), x in self._carried.items() if name not in key}
        self._read = None

    def has_link(self, name: str) -> bool:
        """Return whether a device has peers on other machines, and so a link to them."""
        device = self._devices.get(name)
        return device is not None and device.assumed is not None

    # -- evidence -------------------------------------------------------------------------------------------------

    def record_heartbeat(self, name: str, heartbeat: Heartbeat, now: float, *, busy: bool, loading: bool) -> None:
        """Learn from a device's heartbeat.

        busy: the device computes a run. loading: the device, or a device of the same plan, loads weights.
        """
        device = self._devices.get(name)
        if device is None:
            return
        self._now = now
        reported = None if heartbeat.slowdown == AS_MEASURED or loading else heartbeat.slowdown
        if (slowdown := device.news("slowdown", reported)) is not None:
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
        probed |= {peer: probe for peer, probe in heartbeat.peers.items() if peer != name and peer in self._devices}
        is_shared = busy or loading  # then exchanges are better evidence than probes
        weight = SHARED_LINK if is_shared else 1.0
        for peer, (round_trip_s, bytes_per_s) in probed.items():
            key = (name, peer)
            seconds, rate = device.news(f"round trip {peer}", round_trip_s), device.news(f"rate {peer}", bytes_per_s)
            # Work of a device only lengthens a round trip, so a shorter round trip always counts.
            if seconds is not None and (not is_shared or seconds < self._round_trip_s(name, peer)):
                self._observe("round trip", _ends(name, peer), log(seconds), "idle", weight, now)
            # Tiles share the link, so a rate during a load is not the rate of later runs.
            if rate is not None and not loading and not (is_shared and ("pair rate", key) in self._quantities):
                self._record_rate(key, _log_rate(rate), "idle", weight, now)

    def record_compute(self, name: str, log_ratio: float, now: float) -> None:
        """Learn from a run: logarithm of the device's compute time relative to its price at slowdown 1.

        Runs are the strongest evidence. The meter's readings since the last run give the meter's offset.
        """
        device = self._devices.get(name)
        if device is None:
            return
        change = self._observe("slowdown", (name,), log_ratio, "run", 1.0, now)
        if device.meters and change is None:
            meter = self._quantities["slowdown", (name,)].streams["meter"]
            meter.learn_offset(median_low(device.meters) - log_ratio)
        device.meters.clear()
        device.last_run_s = now

    def record_edge(self, source: str, target: str, bytes_per_s: float, now: float) -> None:
        """Learn from the rate of unhindered exchanges over mesh.

        A pair without a probe is ignored: both devices are on one machine. Exchanges share links. The first exchanges
        after `begin_plan` measure the effect of sharing. Later, only differences from them count, and differences
        beyond any sharing.
        """
        key = (source, target)
        pair, carries = self._quantities.get(("pair rate", key)), self._carries(key)
        if pair is None or carries is None or bytes_per_s <= 0:
            return
        value, stream = _log_rate(bytes_per_s), pair.streams["exchange"]
        most_shared = log(SHARING * max(self._devices[source].sharers, self._devices[target].sharers))
        if stream.offset_count < REBASED:
            gap = min(max(value - carries, -most_shared), 0.0)
            stream.offset += (gap - stream.offset) / (stream.offset_count + 1)
            stream.offset_count += 1
        if (probed := self._carried.get((True, key))) is not None:  # a probe beyond any sharing is wrong
            for name in _PROBED:
                pair.streams[name].learn_offset(max(probed[0] - value - most_shared, 0.0))
        self._record_rate(key, value, "exchange", 1.0, now)

    def _record_rate(self, key: Key, value: float, stream: str, weight: float, now: float) -> None:
        """Learn from the rate of a pair: a line carries as much as its best pair that no other line limits.

        A slower line shows on all pairs of its host, and other lines show on the pairs without that host. The pair's
        own rate explains the rest.
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
        """Learn from exchanges since the last heartbeat, if there were enough; rates during loads do not count."""
        for peer, stats in edges.items():
            nbytes, us = device.timed.get(peer, (stats.timed_bytes, stats.timed_us))
            more, more_us = stats.timed_bytes - nbytes, stats.timed_us - us
            if 0 <= more < LEAST_TIMED_BYTES or 0 <= more_us < LEAST_TIMED_US:
                device.timed.setdefault(peer, (nbytes, us))
                continue
            device.timed[peer] = (stats.timed_bytes, stats.timed_us)
            if more > 0 and more_us > 0 and not loading:
                self.record_edge(peer, name, 1e6 * more / more_us, now)

    def begin_plan(self, names: Collection[str]) -> None:
        """Begin a plan on devices: its exchanges share links in another way."""
        for name in names:
            if (device := self._devices.get(name)) is not None:
                device.sharers = max(len(names) - 1, 1)
        for (what, key), quantity in self._quantities.items():
            if what == "pair rate" and set(key) <= set(names):
                stream = quantity.streams["exchange"]
                stream.offset, stream.offset_count = 0.0, 0
                self._carried.pop((False, key), None)

    def record_overdue(self, names: Iterable[str], now: float) -> None:
        """Note an overdue run of these devices: their meters may detect a change without a run."""
        for name in names:
            if (device := self._devices.get(name)) is not None:
                device.overdue_s = now

    def _observe(
        self, what: What, key: Key, value: float, stream: str, weight: float, now: float, alone: bool = False
    ) -> ChangeEvent | None:
        quantity = self._quantity(what, key, now)
        self._read, self._now = None, now
        change = quantity.observe(value, stream, weight, now, alone=alone)
        if change is not None:
            self.last_change_s = now
        if change == "changed":
            self.last_change_began_s = quantity.changes[-1].began_s
        return change

    def _quantity(self, what: What, key: Key, now: float) -> Quantity:
        """Return a quantity; a new one starts at its prior."""
        if (what, key) not in self._quantities:
            self._quantities[what, key] = Quantity(QUANTITIES[what].prior, now, self._ages)
            self._read = None
        return self._quantities[what, key]

    # -- means ----------------------------------------------------------------------------------------------------

    def slowdown(self, name: str) -> float:
        """Return the mean slowdown of a device, 1 without evidence."""
        return self._exp_mean("slowdown", (name,), 1.0)

    def link(self, name: str) -> Link:
        """Return the mean link of a device to the broker; unmeasured values have defaults."""
        device = self._devices.get(name)
        default = Link().up_bytes_per_s if device is None or device.assumed is None else exp(_LINE.mean)
        bytes_per_s = self._bytes_per_s((name, BROKER)) or default
        round_trip_s = self._exp_mean("round trip", (name, BROKER), 2 * Link().latency_s)
        return Link(round_trip_s / 2, bytes_per_s, bytes_per_s)

    def peer_link(self, source: str, target: str) -> PeerLink:
        """Return the mean link from one device to another over mesh.

        Without a probe its latency is the prior's, or the way over the broker if that is shorter: the broker's machine,
        which is included in its round trips, is not on the way over mesh.
        """
        return PeerLink(self._round_trip_s(source, target) / 2, self._bytes_per_s((source, target)))

    def _round_trip_s(self, source: str, target: str) -> float:
        if target == BROKER:
            return self._exp_mean("round trip", (source, BROKER), inf)
        by_broker_s = 2 * (self.link(source).latency_s + self.link(target).latency_s)
        prior_s = exp(QUANTITIES["round trip"].prior.mean)
        return self._exp_mean("round trip", _ends(source, target), min(by_broker_s, prior_s))

    def peer_links(self, source: str) -> dict[str, PeerLink]:
        """Return the mean links of a device over mesh, without links that only the other end has probed."""
        targets = [
            target
            for target in sorted(self._devices)
            if self._has_probed(source, target)
            or (self.has_link(source) and self.has_link(target) and not self._has_probed(target, source))
        ]
        return {target: self.peer_link(source, target) for target in targets if target != source}

    def _has_probed(self, source: str, target: str) -> bool:
        device = self._devices.get(source)
        return device is not None and device.readings.get(f"round trip {target}") is not None

    def _bytes_per_s(self, key: Key) -> float | None:
        """Return the mean rate of a pair, None before its first measurement."""
        carries = self._carries(key, kin=True) if ("pair rate", key) in self._quantities else None
        return None if carries is None else exp(carries)

    def _carries(self, key: Key, *, kin: bool = False) -> float | None:
        """Return the logarithm of a pair's rate; kin: include the evidence of devices of the same kind."""

        def mean(name: Name) -> float:
            return self._posterior(*name)[0] if kin else self._quantities[name].mean

        lines = [mean(line) for line in _lines(key) if line in self._quantities]
        own = mean(("pair rate", key)) if ("pair rate", key) in self._quantities else 0.0
        return min(lines) + own if lines else None

    def frame_cost(self, name: str) -> FrameCost | None:
        """Return a device's mean cost of frames to other machines; None before its first measurement."""
        device = self._devices.get(name)
        if device is None or device.frame_cost is None:
            return None
        factor = self._exp_mean("frame", (name,), 0.0) / _typical_s(device.frame_cost)
        return FrameCost(factor * device.frame_cost.frame_s, factor * device.frame_cost.byte_s)

    def _exp_mean(self, what: What, key: Key, default: float) -> float:
        return exp(self._posterior(what, key)[0]) if (what, key) in self._quantities else default

    def _posterior(self, what: What, key: Key, now: float | None = None) -> Posterior:
        """Return the posterior of a quantity, combined with its kin; now, or at the last evidence."""
        now = self._now if now is None else now
        if self._read is None or self._read[0] != now:
            kinds: dict[Name, list[Name]] = {}
            for entry in self._quantities:
                kind = tuple(self._devices[name].kind if name in self._devices else name for name in entry[1])
                kinds.setdefault((entry[0], kind), []).append(entry)
            self._read = now, {}
            for kin in kinds.values():
                self._read[1].update(zip(kin, with_kin([self._quantities[k] for k in kin], now), strict=True))
        return self._read[1][what, key]

    # -- uncertainty and change -----------------------------------------------------------------------------------

    def draws(self, names: Collection[str], now: float, count: int = DRAWS, seed: int = 0) -> Draws:
        """Return draws of the posteriors of devices and of the pairs among them; at most `DRAWS` of each."""
        return self._shifted({entry: self._drawn(entry, now, seed)[:count] for entry in self._among(names)})

    def _drawn(self, entry: Name, now: float, seed: int) -> Floats:
        """Return draws of a quantity around its mean; in some of them an unobserved change has ended."""
        order = np.random.default_rng([seed, crc32(repr(entry).encode())]).permutation(DRAWS)
        draws, quantity = sqrt(self._posterior(*entry, now)[1]) * _QUANTILES, self._quantities[entry]
        if (ended := quantity.ended_probability(now)) > 0:
            apart = quantity.mean - quantity.changes[-1].mean
            some = round(DRAWS * min(ended, 1 - ended))
            draws = draws.copy()
            draws[_SPREAD[:some]] += apart if ended > 0.5 else -apart
        return np.asarray(draws[order])

    def _shifted(self, arrays: Mapping[Name, Floats]) -> Draws:
        """Return the draws that prices depend on, from arrays of the quantities' distances from their means."""

        def of(what: What) -> dict[str, Floats]:
            return {key[0]: array for (quantity, key), array in arrays.items() if quantity == what}

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
        """Return the youngest change of these devices and their links, None without a change."""
        quantities = ((entry, self._quantities[entry]) for entry in self._among(names))
        changed = {entry: x for entry, x in quantities if x.ended_probability(now) <= 0.5 and x.changes_since(now)}
        if not changed:
            return None
        youngest = max(changed.values(), key=lambda x: x.changes[-1].began_s)
        before = {entry: np.array([x.changes_since(now)[0].mean - x.mean]) for entry, x in changed.items()}
        remaining = youngest.remaining(now)
        assert remaining is not None
        return YoungestChange(remaining, self._shifted(before))

    def no_evidence_s(self, names: Collection[str], now: float) -> float:
        """Return the longest time without evidence on a device with a changed slowdown, 0 without such a device."""
        changed = [x for name in names if (x := self._quantities.get(("slowdown", (name,)))) and x.changes]
        return max((now - x.at_s for x in changed), default=0.0)

    def _among(self, names: Collection[str]) -> list[Name]:
        ends = {*names, BROKER}
        return [entry for entry in self._quantities if ends.issuperset(entry[1])]

    def means(self) -> dict[Name, float]:
        """Return the mean logarithm of every quantity, as a new plan expects them."""
        measured = {entry: self._posterior(*entry)[0] for entry in self._quantities}
        assumed = {name: device.assumed for name, device in self._devices.items() if device.assumed is not None}
        unmeasured: dict[Name, float] = {("frame", (n,)): log(_typical_s(cost)) for n, cost in assumed.items()}
        lines = {line: _LINE.mean for name in assumed for line in _lines((name, BROKER))}
        return {**unmeasured, **lines, **measured}

    def is_unclear(self, names: Collection[str], now: float) -> bool:
        """Return whether a slowdown of these devices is in doubt and the next run or heartbeats may settle it."""
        quantities = [x for name in names if (x := self._quantities.get(("slowdown", (name,))))]
        return any(x.is_in_doubt and now - x.doubted_s < UNCLEAR_S for x in quantities)

    def in_doubt(self, names: Collection[str], since_s: float) -> bool:
        """Return whether these devices or links between them have changed since a time, or are in doubt."""
        quantities = [self._quantities[entry] for entry in self._among(names)]
        return any(x.is_in_doubt or (x.changes and x.changes[-1].began_s > since_s) for x in quantities)

    def moved(self, expected: Means, used: Collection[str], now: float) -> str | None:
        """Return a sentence about a quantity that differs from the plan's expectation, or None.

        used: the plan's devices; other devices and links count only if they became better. A quantity that was
        unmeasured at that time is compared with the default of a link or a slowdown.
        """
        for what, key in self._quantities:
            spec = QUANTITIES[what]
            mean, variance = self._posterior(what, key, now)
            before = expected.get((what, key), mean if spec.assumed is None else spec.assumed)
            off = mean - before
            better = off > 0 if what in ("rate up", "rate down", "pair rate") else off < 0
            if abs(off) > max(spec.moved, 2 * sqrt(variance)) and (better or {*used, BROKER}.issuperset(key)):
                return f"{_label(what, key)} is {exp(off):.2f} times the value that the plan expects"
        return None

    def describe(self, now: float) -> dict[str, tuple[str, ...]]:
        """Return the evidence on each device in sentences, contradicted meters and probes first."""
        return {name: (*self.contradicted(name), *self._evidence(name, now)) for name in self._devices}

    def contradicted(self, name: str) -> Iterator[str]:
        """Yield a sentence for each meter or probe of a device that its runs or exchanges contradict."""
        for (what, key), quantity in self._quantities.items():
            if key[0] != name:
                continue
            meter = quantity.streams.get("meter")
            if meter is not None and abs(meter.offset) > LIE:
                metered, measured = exp(quantity.mean + meter.offset), exp(quantity.mean)
                yield f"{name} contradicts itself: its meter says slowdown {metered:.2f}, its runs say {measured:.2f}"
            if what != "pair rate" or not quantity.streams["exchange"].count or (carries := self._carries(key)) is None:
                continue
            probed = self._carried.get((True, key), (-inf, 0.0))[0]
            if probed - carries > LIE:
                probed_mb, carried_mb = exp(probed) / 1e6, exp(carries) / 1e6
                yield f"probes from {name} to {key[-1]} say {probed_mb:.1f} MB/s, exchanges say {carried_mb:.1f} MB/s"

    def _evidence(self, name: str, now: float) -> Iterator[str]:
        for what, key in self._quantities:
            if key[0] != name:
                continue
            quantity, (mean, variance) = self._quantities[what, key], self._posterior(what, key, now)
            label = what if len(key) == 1 else f"{what} to {key[1] or 'the broker'}"
            counts = ", ".join(f"{s.count} of {stream}" for stream, s in quantity.streams.items() if s.count)
            _, _, _, factor, unit = QUANTITIES[what]
            yield f"{label} {factor * exp(mean):.3g}{unit} ± {sqrt(variance):.0%} ({counts})"
            if (open_changes := quantity.changes_since(now)) and (remaining := quantity.remaining(now)):
                last = open_changes[-1]
                yield (
                    f"{label} was {factor * exp(last.mean):.3g}{unit} until {now - last.began_s:.0f} s ago; the change "
                    f"lasts about {remaining.median_s:.0f} s more"
                )


def _lines(key: Key) -> tuple[Name, ...]:
    """Return the lines that a pair's bytes cross."""
    source, target = key
    there: tuple[Name, ...] = (("rate up", (source,)), ("rate down", (target,)))
    return (*there, ("rate down", (source,))) if target == BROKER else there


def _ends(source: str, target: str) -> Key:
    """Return the key of a round trip: two peers that probe each other measure the same round trip."""
    return (source, target) if BROKER in (source, target) else (min(source, target), max(source, target))


def _label(what: What, key: Key) -> str:
    name, *peer = (x or "the broker" for x in key)
    return f"{what} from {name} to {peer[0]}" if peer else f"{what} of {name}"


def _typical_s(cost: FrameCost) -> float:
    return cost.frame_s + TYPICAL_FRAME_BYTES * cost.byte_s


def _log_rate(bytes_per_s: float) -> float:
    """Return the logarithm of a rate, limited to four times loopback: more is noise."""
    return log(min(bytes_per_s, 4 * LOCAL_BYTES_PER_S))


# ----------------------------------------------------------------------------------------------------------------------
# Methods: measured times of runs relative to their prices.

#: A division of a model: method, numbers of devices and replicas (0: no replicas), wire, storage and route.
StrategyKey = tuple[str, int, int, str, str, str]

RUN: Final = {"run": Noise(0.08)}
METHOD_DRIFT: Final = 0.002
SINGLE_SD: Final = 0.06  #: of one device, which exchanges nothing
FIRST_SD: Final = 0.2  #: of the first method on several devices
METHOD_SD: Final = 0.10  #: between methods, beyond their shared error
NUMBER_SD: Final = 0.05  #: the same for one method on another number of devices
SURPRISED: Final = 0.15  #: weight of a run while a device or a link may have changed


def strategy_key(plan: Plan) -> StrategyKey:
    """Return the key of the correction that runs under a plan measure."""
    return plan.method, len(plan.devices), len(plan.replicas), plan.wire, plan.weight_dtype, plan.route


@dataclass(frozen=True, slots=True)
class Corrections:
    """Corrections of predicted times, from earlier runs."""

    factors: Mapping[StrategyKey, float] = field(default_factory=dict)  #: measured over predicted time
    sds: Mapping[StrategyKey, float] = field(default_factory=dict)  #: standard deviations of the factors' logarithms

    def factor(self, plan: Plan) -> float:
        """Return the factor on a plan's predicted time.

        Without runs, a division over several devices has the mean factor of the same method on other numbers of
        devices, or of all divisions with runs: the simulator misses links and stalls, which they share. One device has
        no exchanges, so its factor is 1. Replicas have the mean factor of their plans.
        """
        factor = self.factors.get(strategy_key(plan))
        if factor is not None:
            return factor
        if plan.replicas:
            return exp(fmean(log(self.factor(replica)) for replica in plan.replicas))
        near, _ = self._near(strategy_key(plan))
        return exp(fmean(log(self.factors[key]) for key in near)) if near and len(plan.devices) > 1 else 1.0

    def sd(self, plan: Plan) -> float:
        """Return how far the logarithm of that factor may be off."""
        sd = self.sds.get(strategy_key(plan))
        if sd is not None:
            return sd
        if plan.replicas:
            return max(self.sd(replica) for replica in plan.replicas)
        if len(plan.devices) == 1:
            return SINGLE_SD
        near, apart = self._near(strategy_key(plan))
        return sqrt(apart**2 + fmean(self.sds[key] ** 2 for key in near)) if near else FIRST_SD

    def _near(self, key: StrategyKey) -> tuple[list[StrategyKey], float]:
        """Return the divisions nearest to one without runs, and the standard deviation between it and them."""
        exchanging = [other for other in self.factors if other[1] > 1 and not other[2]]
        same = [other for other in exchanging if (other[0], other[3:]) == (key[0], key[3:])]
        return (same, NUMBER_SD) if same else (exchanging, METHOD_SD)


class MethodEstimates:
    """Measured times of one model's runs relative to their prices, by division."""

    def __init__(self) -> None:
        self._divisions: dict[StrategyKey, Quantity] = {}

    def record_run(
        self,
        plan: Plan,
        tokens: int,
        seconds: float,
        now: float,
        spread: float = 0.0,
        weight: float = 1.0,
        whole: Plan | None = None,
    ) -> ChangeEvent | None:
        """Learn from the measured time of a run of `tokens` tokens; no other run used the devices.

        spread: standard deviation of the logarithm of its price, from uncertain devices and links. whole: the plan
        with `plan` as a replica; only its factor is updated, because the same division without replicas may be faster.
        """
        if plan.predicted_s <= 0 or plan.predicted_tokens <= 0 or not 0.8 < tokens / plan.predicted_tokens < 1.25:
            return None  # times of other lengths are not proportional
        ratio = seconds / (plan.predicted_s * tokens / plan.predicted_tokens)
        if not 0 < ratio < inf:
            return None
        key = strategy_key(whole or plan)
        if key not in self._divisions:
            corrections = self.corrections(now)
            prior = Prior(log(corrections.factor(whole or plan)), corrections.sd(whole or plan), METHOD_DRIFT, RUN)
            self._divisions[key] = Quantity(prior, now)
        return self._divisions[key].observe(log(ratio), "run", weight, now, extra_variance=spread**2)

    def undo_since(self, since_s: float) -> None:
        """Undo the changes that began since a time: a device or a link had changed, not the method."""
        for quantity in self._divisions.values():
            quantity.undo_since(since_s)

    def factor(self, plan: Plan) -> float:
        """Return the factor on a plan's predicted time."""
        return self.corrections().factor(plan)

    def sd(self, plan: Plan, now: float | None = None) -> float:
        """Return how far the logarithm of that factor may be off."""
        return self.corrections(now).sd(plan)

    def run_sd(self, plan: Plan) -> float:
        """Return the standard deviation of the logarithm of a run's time, under one plan."""
        division = self._divisions.get(strategy_key(plan))
        return RUN["run"].sd if division is None else sqrt(division.streams["run"].variance)

    def corrections(self, now: float | None = None) -> Corrections:
        """Return the present corrections, as `price` takes them."""
        divisions = self._divisions.items()
        return Corrections({k: exp(x.mean) for k, x in divisions}, {k: x.sd(now) for k, x in divisions})
