"""What measurements and runs say of devices, links and methods: each quantity a posterior, with its uncertainty.

Every quantity is positive and kept as the normal posterior of its logarithm. Meters err together for seconds, so the
variance and the correlation of each stream of observations are learned from the stream. A change test says when the
quantity itself has become another; what was known before is kept, because most changes end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import exp, hypot, inf, log, sqrt
from statistics import NormalDist, fmean, median_low
from typing import Final, Literal, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from hepti_mqtt.cost.profiles import LOCAL_BYTES_PER_S, FrameCost, Link, PeerLink
from hepti_mqtt.plan import DevicePair, Plan
from hepti_mqtt.protocol.messages import Heartbeat, PeerStats

Floats = npt.NDArray[np.float64]

# ----------------------------------------------------------------------------------------------------------------------
# One quantity: a normal posterior of its logarithm, streams of observations, a change test.

CUT: Final = 8.0  # of an error in the change test, in standard deviations
SLACK: Final = 1.0  # standard deviations that an error may have and not count as a change
LOUD: Final = 2.0  # standard deviations by which an observation speaks for a change
LIMIT: Final = 6.0  # of the summed errors: beyond it the quantity has changed
TAIL: Final = 4.0  # degrees of freedom of the noise: an outlier counts less
LEARNING_RATE: Final = 0.02  # of a stream's variance and correlation
LEAST_NOISE, MOST_NOISE = 0.03, 0.5  # bounds of a stream's learned standard deviation
OFFSET_PRIOR: Final = 3.0  # so many observations say beforehand that a stream has no offset
OFFSET_COUNT: Final = 50  # late ones that it is learned from
RECENT: Final = 12  # observations of an excursion that are kept
RESET_SD: Final = 0.12  # at least so little is known right after a change
RESTORED_SD: Final = 0.02
SAME: Final = 0.25  # a change that comes back so close to what was known has ended
KNOWN_SD: Final = 0.15  # a quantity of which less is known has not changed: it is only being learned
NORMAL_S: Final = 300.0  # what has lasted for so long, or for longer than what was before it, is how things are


@dataclass(frozen=True, slots=True)
class Noise:
    """What the noise of a stream is taken to be at first: standard deviation, and correlation from one to the next."""

    sd: float
    correlation: float = 0.0


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a quantity before it was observed.

    mean, sd: of the logarithm; drift: standard deviation by which it wanders in a second. streams: noise by name.
    judge: the stream without which weaker ones do not settle that the quantity has changed; None: each may.
    """

    mean: float
    sd: float
    drift: float
    streams: Mapping[str, Noise]
    judge: str | None = None


@dataclass(slots=True)
class Stream:
    """One kind of observation: variance of its noise and covariance from one to the next, both learned.

    offset: what it says beyond the quantity; offset_count: observations that this was learned from. last: its last
    error; value, at_s: its last observation, and when.
    """

    variance: float
    covariance: float
    last: float = 0.0
    count: int = 0
    offset: float = 0.0
    offset_count: int = 0
    value: float = 0.0
    at_s: float = -inf

    @property
    def repeats(self) -> float:
        """Return how many observations say as much as one would without correlation."""
        correlation = min(max(self.covariance / self.variance, 0.0), 0.9)
        return (1 + correlation) / (1 - correlation)

    def learn_offset(self, gap: float) -> None:
        """Take how far it was off by better evidence."""
        self.offset += (gap - self.offset) / (min(self.offset_count, OFFSET_COUNT) + OFFSET_PRIOR + 1)
        self.offset_count += 1

    def learn_noise(self, error: float) -> None:
        """Take one error more."""
        bounded = self.variance + LEARNING_RATE * (error * error - self.variance)
        self.variance = min(max(bounded, LEAST_NOISE**2), MOST_NOISE**2)
        self.covariance += LEARNING_RATE * (error * self.last - self.covariance)
        self.last = error


class Change(NamedTuple):
    """A change that has not ended: since when, what was known before and since when, its age when it was found."""

    began_s: float
    mean: float
    variance: float
    found_age_s: float
    since_s: float

    def is_normal(self, now: float) -> bool:
        """Return whether it is how things are: what is as it was before would be the change then."""
        return now - self.began_s >= min(NORMAL_S, self.began_s - self.since_s)


class EndedChange(NamedTuple):
    """How far a quantity had gone, the age of the change when it was found, and in the end."""

    size: float
    found_age_s: float
    age_s: float


class Remaining(NamedTuple):
    """How much longer a change of some age lasts: t seconds more with probability (age / (age + t)) ** exponent."""

    age_s: float
    exponent: float

    @property
    def median_s(self) -> float:
        """Return the seconds that it lasts more in half of all cases."""
        return self.age_s * float(2 ** (1 / self.exponent) - 1)

    def survival(self, seconds: float) -> float:
        """Return the probability that it lasts for some seconds more."""
        return float((self.age_s / (self.age_s + max(seconds, 0.0))) ** self.exponent)

    def expected_s(self, start_s: float, stop_s: float) -> float:
        """Return how many of the seconds between two times from now it is expected to last."""
        if start_s >= stop_s:
            return 0.0
        (a, b), one_less = (1 + start_s / self.age_s, 1 + stop_s / self.age_s), 1 - self.exponent
        return self.age_s * (log(b / a) if abs(one_less) < 1e-6 else (b**one_less - a**one_less) / one_less)


class ChangeAges:
    """How long changes last: ages follow a Pareto law whose exponent those about as large have taught."""

    PRIOR_COUNT: Final = 2.0  # made-up changes ...
    PRIOR_EXPONENT: Final = 0.75  # ... with this exponent: what has lasted will last 1.5 times as long again

    def __init__(self) -> None:
        self._ended: deque[EndedChange] = deque(maxlen=40)

    def record(self, ended: EndedChange) -> None:
        """Take a change that has ended."""
        self._ended.append(ended)

    def remaining(self, change: Change, mean: float, now: float) -> Remaining:
        """Return how much longer a change will last, by its size and its age."""
        size, age_s = abs(mean - change.mean), max(now - change.began_s, 1.0)
        like = [e for e in self._ended if 0.6 * size < e.size < 1.6 * size]
        total = self.PRIOR_COUNT / self.PRIOR_EXPONENT + sum(log(e.age_s / e.found_age_s) for e in like)
        total += max(log(age_s / change.found_age_s), 0.0)  # this one counts as not yet ended
        return Remaining(age_s, (self.PRIOR_COUNT + len(like)) / total)


class _Excursion(NamedTuple):
    value: float
    score: float
    precision: float
    sd: float
    stream: str
    at_s: float


Found = Literal["changed", "ended"]
Posterior = tuple[float, float]  # mean and variance


class Quantity:
    """The posterior of one logarithm; `now` by any one clock, in seconds.

    changes: those that have not ended, the oldest first. count: of observations; at_s: when the last one came.
    """

    def __init__(self, prior: Prior, now: float, ages: ChangeAges | None = None) -> None:
        self._prior, self._ages, self.at_s, self._since_s = prior, ages or ChangeAges(), now, now
        self.mean, self.variance = prior.mean, prior.sd**2
        self.streams = {
            name: Stream(noise.sd**2, noise.correlation * noise.sd**2) for name, noise in prior.streams.items()
        }
        self.changes: list[Change] = []
        self.count = 0
        self._up = self._down = 0.0
        self._recent: deque[_Excursion] = deque(maxlen=RECENT)

    def sd(self, now: float | None = None) -> float:
        """Return the standard deviation, now or when it was last observed."""
        waited_s = 0.0 if now is None else max(now - self.at_s, 0.0)
        return sqrt(self.variance + self._prior.drift**2 * waited_s)

    @property
    def is_in_doubt(self) -> bool:
        """Return whether half of what a change takes has been seen."""
        return max(self._up, self._down) > LIMIT / 2

    @property
    def doubted_s(self) -> float:
        """Return since when something speaks for a change, infinity if nothing does."""
        return self._recent[0].at_s if self._recent else inf

    def observe(
        self,
        log_value: float,
        stream: str,
        weight: float,
        now: float,
        *,
        alone: bool = False,
        extra_variance: float = 0.0,
    ) -> Found | None:
        """Take an observation; return "changed" if the quantity has become another, "ended" if such a change is over.

        weight: below 1 for a doubtful one. alone: such observations may say by themselves that it has changed; others
        go half of the way, unless they are the judge's. extra_variance: of what else the value depends on.
        """
        heard = self.streams[stream]
        self.variance += self._prior.drift**2 * max(now - self.at_s, 0.0)
        self.at_s, self.count, heard.count = max(now, self.at_s), self.count + 1, heard.count + 1
        heard.value, heard.at_s = log_value, now
        value, noise = log_value - heard.offset, heard.variance + extra_variance
        error, repeats = value - self.mean, heard.repeats
        score = error / sqrt(self.variance + noise / weight)
        seen = _Excursion(value, score, weight / (noise * repeats), sqrt(noise / weight), stream, now)
        if self._test(seen, weight / sqrt(repeats), alone):
            return self._become(now)
        spread = noise * repeats / weight
        spread *= max((TAIL + error * error / (self.variance + spread)) / (TAIL + 1), 1.0)
        gain = self.variance / (self.variance + spread)
        self.mean += gain * error
        self.variance *= 1 - gain
        if abs(score) < 4 and weight >= 0.8 and extra_variance <= heard.variance:
            heard.learn_noise(error)
        return None

    def undo_since(self, since_s: float) -> bool:
        """Take back the changes found to have begun since then: their cause was another quantity."""
        undone = next((c for c in self.changes if c.began_s >= since_s), None)
        if undone is None:
            return False
        self.mean, self.variance, self._since_s = undone.mean, undone.variance, undone.since_s
        del self.changes[self.changes.index(undone) :]
        return True

    def changes_since(self, now: float) -> list[Change]:
        """Return the changes that are not yet how things are."""
        normal = [i for i, change in enumerate(self.changes) if change.is_normal(now)]
        return self.changes[normal[-1] + 1 :] if normal else list(self.changes)

    def remaining(self, now: float) -> Remaining | None:
        """Return how much longer the last change will last, None without one."""
        return self._ages.remaining(self.changes[-1], self.mean, now) if self.changes else None

    def ended_unheard(self, now: float) -> float:
        """Return the probability that the last change has ended since the last observation."""
        remaining = self.remaining(self.at_s)
        return 0.0 if remaining is None else 1 - remaining.survival(now - self.at_s)

    def believed(self, now: float | None = None) -> Posterior:
        """Return mean and variance, now or when it was last observed; what was before, if a change has likely ended."""
        if now is not None and self.ended_unheard(now) > 0.5:
            return self.changes[-1].mean, self.changes[-1].variance + RESET_SD**2
        return self.mean, self.sd(now) ** 2

    def _test(self, seen: _Excursion, step: float, alone: bool) -> bool:
        """Return whether the two-sided sum of errors says that the quantity has changed."""
        judges = self._prior.judge in (None, seen.stream)
        most = inf if alone or judges else LIMIT / 2
        cut, step = min(max(seen.score, -CUT), CUT), min(step, 1.0)
        self._up = max(0.0, min(self._up + step * (cut - SLACK), max(most, self._up)))
        self._down = max(0.0, min(self._down + step * (-cut - SLACK), max(most, self._down)))
        if self._up == self._down == 0.0:
            self._recent.clear()
            return False
        self._recent.append(seen)
        if max(self._up, self._down) <= LIMIT:
            return False
        # One stall is no change, nor one now and then: two runs have said so alike, or two of what may speak alone, and
        # with them most of what came since.
        judge, alike = None if alone else self._prior.judge, self._alike()
        since = [one for one in self._recent if one.at_s >= alike[0].at_s]
        loud = sum(one.score * self._sign >= LOUD and judge in (None, one.stream) for one in alike)
        return loud > 1 and 2 * len(alike) > len(since)

    @property
    def _sign(self) -> int:
        return 1 if self._up >= self._down else -1

    def _alike(self) -> list[_Excursion]:
        """Return what came since the sum of errors left 0 and says about the same as the last one."""
        last = self._recent[-1]
        within = [max(SAME, 3 * hypot(one.sd, last.sd)) for one in self._recent]
        return [one for one, most in zip(self._recent, within, strict=True) if abs(one.value - last.value) <= most]

    def _become(self, now: float) -> Found | None:
        """Take the weighted median of what says alike that it has changed; what that returns to holds again."""
        mean, variance, since = self.mean, self.variance, self._alike()
        began_s = since[0].at_s - 1.0  # observations are of the last second
        total, half = sum(one.precision for one in since), 0.0
        for one in sorted(since, key=lambda one: one.value):
            self.mean, half = one.value, half + one.precision
            if half >= total / 2:
                break
        self.variance = max(1 / total, RESET_SD**2)
        self._up = self._down = 0.0
        self._recent.clear()
        self.changes = self.changes_since(now)
        ended = next((c for c in self.changes if abs(self.mean - c.mean) < SAME), None)
        if ended is None:
            if variance > KNOWN_SD**2:
                return None
            self.changes.append(Change(began_s, mean, variance, max(now - began_s, 1.0), self._since_s))
            self._since_s = began_s
            return "changed"
        age_s = max(now - ended.began_s, ended.found_age_s)
        self._ages.record(EndedChange(abs(mean - ended.mean), ended.found_age_s, age_s))
        self.mean, self.variance, self._since_s = ended.mean, max(ended.variance, RESTORED_SD**2), ended.since_s
        del self.changes[self.changes.index(ended) :]
        return "ended"


# ----------------------------------------------------------------------------------------------------------------------
# Kin: devices of one kind share a prior when they are read.

KIN_SD: Final = 0.04  # how far equal devices differ


def with_kin(kin: Sequence[Quantity], now: float | None = None) -> list[Posterior]:
    """Return the posteriors of quantities of one kind, with what they say of each other.

    The further one is from the others, for what is known of it, the less they say of it.
    """
    own = [x.believed(now) for x in kin]
    if len(own) < 2:
        return own
    middle = median_low([mean for mean, _ in own])
    weights = [_belongs(m - middle, v + KIN_SD**2) / (v + KIN_SD**2) for m, v in own]
    shared = sum(w * mean for w, (mean, _) in zip(weights, own, strict=True)) / sum(weights)
    width, found = KIN_SD**2 + 1 / sum(weights), []
    for mean, variance in own:
        precision = _belongs(mean - shared, variance + width) / width
        less = 1 / (1 / variance + precision)
        found.append(((mean / variance + shared * precision) * less, less))
    return found


def _belongs(apart: float, variance: float) -> float:
    """Return how far one belongs to its kind: 1 within two standard deviations, less and less beyond."""
    return min(4 * variance / max(apart * apart, 1e-12), 1.0) ** 2


# ----------------------------------------------------------------------------------------------------------------------
# The site: slowdown, frame cost and line of each device, and what is peculiar to each pair.

What = Literal["slowdown", "rate up", "rate down", "pair rate", "round trip", "frame"]
Key = tuple[str, ...]  # a device, or a pair (source, target)
Name = tuple[What, Key]
Means = Mapping[Name, float]  # logarithms
BROKER: Final = ""  # as the target of a pair: frames go there and come back

_PROBED: Final = {"idle": Noise(0.12), "busy": Noise(0.35)}
_CARRIED: Final = {**_PROBED, "exchange": Noise(0.2)}
_LINE: Final = Prior(log(30e6), 2.0, 0.002, _CARRIED)
PRIORS: Final[Mapping[What, Prior]] = {
    "slowdown": Prior(0.0, 0.2, 0.0025, {"run": Noise(0.10), "meter": Noise(0.25, 0.5)}, judge="run"),
    "rate up": _LINE,
    "rate down": _LINE,
    "pair rate": Prior(0.0, 0.1, 0.002, _CARRIED),  # over what the lines of both ends carry
    "round trip": Prior(log(1e-3), 2.0, 0.002, _PROBED),
    "frame": Prior(log(2e-4), 2.0, 0.002, {"fit": Noise(0.25, 0.5)}),
}

TYPICAL_FRAME_BYTES: Final = 1 << 16  # of a frame whose cost is estimated
CONTRADICTED_S: Final = 10.0  # after a run the next ones may contradict a device's meter for so long
UNCLEAR_S: Final = 2.5  # two heartbeats, or a run: a doubt that they have not settled waits for nothing
SPEAKS_S: Final = 3.0  # an overdue run lets meters speak alone for so long
BESIDE_LOADS: Final = 0.15  # weight of a meter while a device loads weights
SHARED_LINK: Final = 0.2  # weight of a probe beside exchanges that says less: it shared the link
LOADED_LINK: Final = 0.3  # of one beside loads that says more
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

        assumed: what plans are made with before it has met frames off loopback; None: it has no such peers.
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

    # -- evidence -------------------------------------------------------------------------------------------------

    def record_heartbeat(self, name: str, heartbeat: Heartbeat, now: float, *, busy: bool, loading: bool) -> None:
        """Take what a device says of itself.

        busy: it has a part in a run. loading: it, or one that it works with, loads weights.
        """
        device = self._devices.get(name)
        if device is None:
            return
        weight, self._now = BESIDE_LOADS if loading else 1.0, now
        said = None if heartbeat.slowdown == AS_MEASURED else heartbeat.slowdown
        if (slowdown := device.news("slowdown", said)) is not None:
            judged = busy or now - device.last_run_s < CONTRADICTED_S
            alone = not judged or now - device.overdue_s < SPEAKS_S
            device.meters.append(log(slowdown))
            self._observe("slowdown", (name,), log(slowdown), "meter", weight, now, alone)
        if heartbeat.peer_frame_s is not None and heartbeat.peer_byte_s is not None:
            cost = FrameCost(heartbeat.peer_frame_s, heartbeat.peer_byte_s)
            if (seconds := device.news("frame", _typical_s(cost))) is not None:
                device.frame_cost = cost
                self._observe("frame", (name,), log(seconds), "fit", weight, now)
        self._record_edges(name, device, heartbeat.edges, now)
        probed: dict[str, tuple[float | None, float | None]] = {
            BROKER: (heartbeat.round_trip_s, heartbeat.bandwidth_bytes_per_s)
        }
        probed |= {peer: told for peer, told in heartbeat.peers.items() if peer != name and peer in self._devices}
        stream = "busy" if busy or loading else "idle"
        for peer, (round_trip_s, bytes_per_s) in probed.items():
            key = (name, peer)
            if (seconds := device.news(f"round trip {peer}", round_trip_s)) is not None:
                known = self._quantities.get(("round trip", key))
                if weight := _probe_weight(known is not None and log(seconds) > known.mean, stream, loading):
                    self._observe("round trip", key, log(seconds), stream, weight, now)
            if (rate := device.news(f"rate {peer}", bytes_per_s)) is not None:
                value, carries = _log_rate(rate), self._carries(key)
                if weight := _probe_weight(carries is not None and value < carries, stream, loading):
                    self._record_rate(key, value, stream, weight, now)

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
                if own is None or carried > own.mean or slowest > own.mean - SAME:
                    best = max(best, carried)
            if best > -inf and best != self._best.get((probed, line)):
                self._best[probed, line] = best
                self._observe(*line, best, stream, weight, now)
        lines = min(self._quantities[line].mean for line in _lines(key) if line in self._quantities)
        pair.observe(value - lines, stream, OF_PAIR * weight, now)

    def _record_edges(self, name: str, device: _Device, edges: Mapping[str, PeerStats], now: float) -> None:
        """Take what came from peers since the last heartbeat, where that says enough."""
        for peer, told in edges.items():
            nbytes, us = device.timed.get(peer, (told.timed_bytes, told.timed_us))
            more, more_us = told.timed_bytes - nbytes, told.timed_us - us
            if 0 <= more < LEAST_TIMED_BYTES or 0 <= more_us < LEAST_TIMED_US:
                device.timed.setdefault(peer, (nbytes, us))
                continue
            device.timed[peer] = (told.timed_bytes, told.timed_us)
            if more > 0 and more_us > 0:
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
        bytes_per_s = self._bytes_per_s((name, BROKER)) or Link().up_bytes_per_s
        round_trip_s = self._exp_mean("round trip", (name, BROKER), 2 * Link().latency_s)
        return Link(round_trip_s / 2, bytes_per_s, bytes_per_s)

    def peer_link(self, source: str, target: str) -> PeerLink | None:
        """Return the mean link from one device straight to another; None before it was probed."""
        if ("round trip", (source, target)) not in self._quantities:
            return None
        round_trip_s = self._exp_mean("round trip", (source, target), 0.0)
        return PeerLink(round_trip_s / 2, self._bytes_per_s((source, target)))

    def peer_links(self, source: str) -> dict[str, PeerLink]:
        """Return the mean links of a device straight to others."""
        targets = {key[1] for what, key in self._quantities if what == "round trip" and key[0] == source}
        return {t: x for t in sorted(targets - {BROKER}) if (x := self.peer_link(source, t)) is not None}

    def _bytes_per_s(self, key: Key) -> float | None:
        """Return the mean rate of a pair, None before it was measured."""
        carries = self._carries(key, kin=True) if ("pair rate", key) in self._quantities else None
        return None if carries is None else exp(carries)

    def _carries(self, key: Key, *, kin: bool = False) -> float | None:
        """Return the logarithm of what a pair carries; kin: with what devices of a kind say of each other."""
        mean = (lambda name: self._posterior(*name)[0]) if kin else (lambda name: self._quantities[name].mean)
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
        return {**unmet, **met}

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


def _whose(what: What, key: Key) -> str:
    name, *peer = (x or "the broker" for x in key)
    return f"{what} from {name} to {peer[0]}" if peer else f"{what} of {name}"


def _probe_weight(is_worse: bool, stream: str, loading: bool) -> float:
    """Return the weight of a probe. One beside exchanges that found a link worse than believed has shared it.

    One beside loads that did says nothing: a load takes what the link has left for as long as it lasts.
    """
    if loading:
        return 0.0 if is_worse else LOADED_LINK
    return SHARED_LINK if stream == "busy" and is_worse else 1.0


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
