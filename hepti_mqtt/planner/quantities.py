"""One measured quantity: a normal posterior of its logarithm, streams of observations, a change test.

Every quantity is positive. Meters err together for seconds, so the variance and the correlation of each stream of
observations are learned from the stream. A change test detects when the quantity itself has changed. The posterior
before the change is kept, because most changes end. The longer a quantity is unobserved, the more likely its change has
ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf, log, sqrt
from statistics import median_low
from typing import Final, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Estimator:
    """Constants of the estimator: a normal posterior under Student noise, and a two-sided CUSUM as its change test.

    Standard deviations are of logarithms.
    """

    # The change test: g = max(0, g + min(|z|, clip) - slack) on standardised errors z, in standard deviations.
    clip: float = 8.0  #: limit of one error
    slack: float = 1.0  #: error that does not count as a change
    threshold: float = 6.0  #: sum of errors beyond which the quantity has changed
    alarm: float = 2.0  #: least error of an observation that speaks for a change; two must
    window: int = 12  #: observations since the sum left 0 that are kept
    same: float = 0.25  #: a change has ended if the value is this close to the value before it
    normal_s: float = 300.0  #: a change that lasts this long, or longer than the state before it, is the normal state
    # The posterior.
    degrees_of_freedom: float = 4.0  #: of the Student noise: an outlier counts less
    reset_sd: float = 0.12  #: least standard deviation right after a change
    restored_sd: float = 0.02  #: least standard deviation after the end of a change
    known_sd: float = 0.15  #: a quantity with a larger standard deviation cannot change: it is still being learned
    # Learned noise of a stream.
    learning_rate: float = 0.02  #: of its variance and correlation
    least_noise_sd: float = 0.03
    most_noise_sd: float = 0.5
    offset_prior: float = 3.0  #: pseudo-observations of a stream without an offset
    offset_window: int = 50  #: last observations that the offset is learned from


ESTIMATOR: Final = Estimator()


@dataclass(frozen=True, slots=True)
class Noise:
    """The initial noise of a stream: standard deviation, and correlation between successive observations."""

    sd: float
    correlation: float = 0.0


@dataclass(frozen=True, slots=True)
class Prior:
    """The distribution of a quantity before its first observation; mean and sd are of the logarithm."""

    mean: float
    sd: float
    drift: float  #: standard deviation of the random walk in one second
    streams: Mapping[str, Noise]  #: noise by stream
    judge: str | None = None  #: the stream that must confirm a change; None: each stream alone may


@dataclass(slots=True)
class Stream:
    """One kind of observation of a quantity; its noise is learned."""

    variance: float
    covariance: float  #: of the noise of successive observations
    last: float = 0.0  #: error of the last observation
    count: int = 0
    offset: float = 0.0  #: bias: mean of the observations minus the quantity
    offset_count: int = 0  #: observations that the offset is learned from

    @property
    def repeats(self) -> float:
        """Return how many correlated observations are worth one independent observation."""
        correlation = min(max(self.covariance / self.variance, 0.0), 0.9)
        return (1 + correlation) / (1 - correlation)

    def learn_offset(self, gap: float) -> None:
        """Update the offset by an observation's difference from better evidence."""
        self.offset += (gap - self.offset) / (
            min(self.offset_count, ESTIMATOR.offset_window) + ESTIMATOR.offset_prior + 1
        )
        self.offset_count += 1

    def learn_noise(self, error: float) -> None:
        """Update variance and covariance by an observation's error."""
        bounded = self.variance + ESTIMATOR.learning_rate * (error * error - self.variance)
        self.variance = min(max(bounded, ESTIMATOR.least_noise_sd**2), ESTIMATOR.most_noise_sd**2)
        self.covariance += ESTIMATOR.learning_rate * (error * self.last - self.covariance)
        self.last = error


class Change(NamedTuple):
    """A change that has not ended."""

    began_s: float
    mean: float  #: of the posterior before the change
    variance: float  #: of the posterior before the change
    detected_age_s: float  #: age of the change at its detection
    since_s: float  #: start of the state before the change

    def is_normal(self, now: float) -> bool:
        """Return whether the changed value is the normal state by now: a return would be a new change."""
        return now - self.began_s >= min(ESTIMATOR.normal_s, self.began_s - self.since_s)


class EndedChange(NamedTuple):
    """A change after its end."""

    size: float  #: distance from the mean before the change
    detected_age_s: float  #: age of the change at its detection
    age_s: float  #: age of the change at its end


class Remaining(NamedTuple):
    """Pareto law of a change's remaining time t: it is longer with probability (age / (age + t)) ** exponent."""

    age_s: float
    exponent: float

    @property
    def median_s(self) -> float:
        """Return the median of the remaining seconds."""
        return self.age_s * float(2 ** (1 / self.exponent) - 1)

    def survival(self, seconds: float) -> float:
        """Return the probability that the change lasts for some more seconds."""
        return float((self.age_s / (self.age_s + max(seconds, 0.0))) ** self.exponent)

    def expected_s(self, start_s: float, stop_s: float) -> float:
        """Return the expected seconds of the change between two times, both in seconds from now."""
        if start_s >= stop_s:
            return 0.0
        (a, b), one_less = (1 + start_s / self.age_s, 1 + stop_s / self.age_s), 1 - self.exponent
        return self.age_s * (log(b / a) if abs(one_less) < 1e-6 else (b**one_less - a**one_less) / one_less)


class ChangeAges:
    """Durations of changes: a Pareto law; its exponent is learned from changes of a similar size."""

    PRIOR_COUNT: Final = 2.0  #: pseudo-observations of the prior
    PRIOR_EXPONENT: Final = 0.75  #: of the prior: the median of the remaining time is 1.5 times the age

    def __init__(self) -> None:
        self._ended: deque[EndedChange] = deque(maxlen=40)

    def record(self, ended: EndedChange) -> None:
        """Learn from a change that has ended."""
        self._ended.append(ended)

    def remaining(self, change: Change, mean: float, now: float) -> Remaining:
        """Return the remaining time of a change, by its size and its age."""
        size, age_s = abs(mean - change.mean), max(now - change.began_s, 1.0)
        like = [e for e in self._ended if 0.6 * size < e.size < 1.6 * size]
        total = self.PRIOR_COUNT / self.PRIOR_EXPONENT + sum(log(e.age_s / e.detected_age_s) for e in like)
        total += max(log(age_s / change.detected_age_s), 0.0)  # a censored observation: this change has not ended yet
        return Remaining(age_s, (self.PRIOR_COUNT + len(like)) / total)


class _Excursion(NamedTuple):
    value: float
    score: float
    precision: float
    sd: float
    stream: str
    at_s: float


ChangeEvent = Literal["changed", "ended"]
Posterior = tuple[float, float]  # mean and variance


class Quantity:
    """The posterior of the logarithm of one quantity; all calls take `now` from the same clock, in seconds."""

    def __init__(self, prior: Prior, now: float, ages: ChangeAges | None = None) -> None:
        # at_s: time of the last observation.
        self._prior, self._ages, self.at_s, self._since_s = prior, ages or ChangeAges(), now, now
        self.mean, self.variance = prior.mean, prior.sd**2
        self.streams = {
            name: Stream(noise.sd**2, noise.correlation * noise.sd**2) for name, noise in prior.streams.items()
        }
        self.changes: list[Change] = []  #: changes that have not ended, the oldest first
        self.count = 0  #: number of observations
        self._up = self._down = 0.0
        self.doubted_s = now  #: time of the first observation of the current doubt, if there is one
        self._recent: deque[_Excursion] = deque(maxlen=ESTIMATOR.window)

    def sd(self, now: float | None = None) -> float:
        """Return the standard deviation now, or at the last observation."""
        waited_s = 0.0 if now is None else max(now - self.at_s, 0.0)
        return sqrt(self.variance + self._prior.drift**2 * waited_s)

    @property
    def is_in_doubt(self) -> bool:
        """Return whether the CUSUM is beyond half of its threshold."""
        return max(self._up, self._down) > ESTIMATOR.threshold / 2

    def observe(
        self,
        log_value: float,
        stream: str,
        weight: float,
        now: float,
        *,
        alone: bool = False,
        extra_variance: float = 0.0,
    ) -> ChangeEvent | None:
        """Update the posterior by an observation; return "changed" or "ended" if a change begins or ends.

        weight: below 1 for a doubtful observation. alone: the stream may detect a change without the judge; otherwise
        its CUSUM stops at half of the threshold. extra_variance: of other influences on the value.
        """
        state = self.streams[stream]
        if self.ended_probability(now) > 0.5 and self._is_as_before(log_value - state.offset):
            state.count += 1
            self._end(self.changes[-1], now)
            return "ended"
        self.variance += self._prior.drift**2 * max(now - self.at_s, 0.0)
        self.at_s, self.count, state.count = max(now, self.at_s), self.count + 1, state.count + 1
        value, noise = log_value - state.offset, state.variance + extra_variance
        error, repeats = value - self.mean, state.repeats
        score = error / sqrt(self.variance + noise / weight)
        excursion = _Excursion(value, score, weight / (noise * repeats), sqrt(noise / weight), stream, now)
        if self._test(excursion, weight / sqrt(repeats), alone):
            return self._become(now)
        spread = noise * repeats / weight
        spread *= max(
            (ESTIMATOR.degrees_of_freedom + error * error / (self.variance + spread))
            / (ESTIMATOR.degrees_of_freedom + 1),
            1.0,
        )
        gain = self.variance / (self.variance + spread)
        self.mean += gain * error
        self.variance *= 1 - gain
        if abs(score) < 4 and weight >= 0.8 and extra_variance <= state.variance:
            state.learn_noise(error)
        return None

    def undo_since(self, since_s: float) -> bool:
        """Undo the changes that began since a time: another quantity caused them."""
        undone = next((c for c in self.changes if c.began_s >= since_s), None)
        if undone is None:
            return False
        self.mean, self.variance, self._since_s = undone.mean, undone.variance, undone.since_s
        del self.changes[self.changes.index(undone) :]
        return True

    def changes_since(self, now: float) -> list[Change]:
        """Return the changes after the last change with a value that is the normal state."""
        normal = [i for i, change in enumerate(self.changes) if change.is_normal(now)]
        return self.changes[normal[-1] + 1 :] if normal else list(self.changes)

    def remaining(self, now: float) -> Remaining | None:
        """Return the remaining time of the last change, None without a change."""
        return self._ages.remaining(self.changes[-1], self.mean, now) if self.changes else None

    def ended_probability(self, now: float) -> float:
        """Return the probability that the last change has ended since the last observation."""
        remaining = self.remaining(self.at_s)
        return 0.0 if remaining is None else 1 - remaining.survival(now - self.at_s)

    def believed(self, now: float | None = None) -> Posterior:
        """Return the posterior now, or at the last observation; before the last change, if it has probably ended."""
        if now is not None and self.ended_probability(now) > 0.5:
            return self.changes[-1].mean, self.changes[-1].variance + ESTIMATOR.reset_sd**2
        return self.mean, self.sd(now) ** 2

    def _test(self, excursion: _Excursion, step: float, alone: bool) -> bool:
        """Update the two-sided CUSUM; return whether the quantity has changed."""
        judges = self._prior.judge in (None, excursion.stream)
        limit = inf if alone or judges else ESTIMATOR.threshold / 2
        clipped, step = min(max(excursion.score, -ESTIMATOR.clip), ESTIMATOR.clip), min(step, 1.0)
        if not self.is_in_doubt:
            self.doubted_s = excursion.at_s
        self._up = max(0.0, min(self._up + step * (clipped - ESTIMATOR.slack), max(limit, self._up)))
        self._down = max(0.0, min(self._down + step * (-clipped - ESTIMATOR.slack), max(limit, self._down)))
        if self._up == self._down == 0.0:
            self._recent.clear()
            return False
        self._recent.append(excursion)
        if max(self._up, self._down) <= ESTIMATOR.threshold:
            return False
        # A stall, or an occasional stall, is not a change. A change needs two similar observations of the judge (or of
        # a stream that may detect changes alone), and most observations since then must agree with them.
        judge, similar = None if alone else self._prior.judge, self._similar()
        since = [one for one in self._recent if one.at_s >= similar[0].at_s]
        sign = 1 if self._up >= self._down else -1
        alarms = sum(one.score * sign >= ESTIMATOR.alarm and judge in (None, one.stream) for one in similar)
        return alarms > 1 and 2 * len(similar) > len(since)

    def _similar(self) -> list[_Excursion]:
        """Return the observations since the CUSUM left 0 that are similar to the last one."""
        last = self._recent[-1]
        within = [max(ESTIMATOR.same, 3 * hypot(one.sd, last.sd)) for one in self._recent]
        return [one for one, limit in zip(self._recent, within, strict=True) if abs(one.value - last.value) <= limit]

    def _become(self, now: float) -> ChangeEvent | None:
        """Set the posterior to the weighted median of similar observations, or restore one from before a change."""
        mean, variance, since = self.mean, self.variance, self._similar()
        began_s = since[0].at_s - 1.0  # observations are of the last second
        total, half = sum(one.precision for one in since), 0.0
        for one in sorted(since, key=lambda one: one.value):
            self.mean, half = one.value, half + one.precision
            if half >= total / 2:
                break
        self.variance = max(1 / total, ESTIMATOR.reset_sd**2)
        self._up = self._down = 0.0
        self._recent.clear()
        self.changes = self.changes_since(now)
        ended = next((c for c in self.changes if abs(self.mean - c.mean) < ESTIMATOR.same), None)
        if ended is None:
            if variance > ESTIMATOR.known_sd**2:
                return None
            self.changes.append(Change(began_s, mean, variance, max(now - began_s, 1.0), self._since_s))
            self._since_s = began_s
            return "changed"
        self.mean = mean
        self._end(ended, now)
        return "ended"

    def _is_as_before(self, value: float) -> bool:
        return abs(value - self.changes[-1].mean) < abs(value - self.mean)

    def _end(self, ended: Change, now: float) -> None:
        """End a change: restore the posterior before it."""
        age_s = max(now - ended.began_s, ended.detected_age_s)
        self._ages.record(EndedChange(abs(self.mean - ended.mean), ended.detected_age_s, age_s))
        self.mean, self.variance, self._since_s = (
            ended.mean,
            max(ended.variance, ESTIMATOR.restored_sd**2),
            ended.since_s,
        )
        self.at_s, self._up, self._down = now, 0.0, 0.0
        self._recent.clear()
        del self.changes[self.changes.index(ended) :]


# ----------------------------------------------------------------------------------------------------------------------
# Kin: devices of one kind share a prior when their posteriors are read.

KIN_SD: Final = 0.04  # standard deviation between equal devices


def with_kin(kin: Sequence[Quantity], now: float | None = None) -> list[Posterior]:
    """Return the posteriors of quantities of one kind, each combined with the others.

    The others count less for a quantity that is far from them, measured by its standard deviation.
    """
    own = [x.believed(now) for x in kin]
    if len(own) < 2:
        return own
    middle = median_low([mean for mean, _ in own])
    weights = [_kin_weight(m - middle, v + KIN_SD**2) / (v + KIN_SD**2) for m, v in own]
    shared = sum(w * mean for w, (mean, _) in zip(weights, own, strict=True)) / sum(weights)
    width, posteriors = KIN_SD**2 + 1 / sum(weights), []
    for mean, variance in own:
        precision = _kin_weight(mean - shared, variance + width) / width
        less = 1 / (1 / variance + precision)
        posteriors.append(((mean / variance + shared * precision) * less, less))
    return posteriors


def _kin_weight(apart: float, variance: float) -> float:
    """Return the weight of a member of its kind: 1 within two standard deviations, falling beyond."""
    return min(4 * variance / max(apart * apart, 1e-12), 1.0) ** 2
