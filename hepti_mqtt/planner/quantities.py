"""One measured quantity: a normal posterior of its logarithm, streams of observations, a change test.

Every quantity is positive. Meters err together for seconds, so the variance and the correlation of each stream of
observations are learned from the stream. A change test says when the quantity itself has become another; what was
known before is kept, because most changes end, and the longer nothing is heard, the more likely they have.
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
    clip: float = 8.0  #: most that one error counts
    slack: float = 1.0  #: error that does not count as a change
    threshold: float = 6.0  #: sum of errors beyond which the quantity has changed
    alarm: float = 2.0  #: least error of an observation that speaks for a change; two must
    window: int = 12  #: observations since the sum left 0 that are kept
    same: float = 0.25  #: a change that returns so close to the value before it has ended
    normal_s: float = 300.0  #: a change that lasts so long, or longer than the state before it, is the normal state
    # The posterior.
    degrees_of_freedom: float = 4.0  #: of the Student noise: an outlier counts less
    reset_sd: float = 0.12  #: least standard deviation right after a change
    restored_sd: float = 0.02  #: least standard deviation after the end of a change
    known_sd: float = 0.15  #: a quantity that is known less well has not changed: it is still being learned
    # Learned noise of a stream.
    learning_rate: float = 0.02  #: of its variance and correlation
    least_noise_sd: float = 0.03
    most_noise_sd: float = 0.5
    offset_prior: float = 3.0  #: made-up observations of a stream without an offset
    offset_window: int = 50  #: last observations that the offset is learned from


ESTIMATOR: Final = Estimator()


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
        self.offset += (gap - self.offset) / (
            min(self.offset_count, ESTIMATOR.offset_window) + ESTIMATOR.offset_prior + 1
        )
        self.offset_count += 1

    def learn_noise(self, error: float) -> None:
        """Take one error more."""
        bounded = self.variance + ESTIMATOR.learning_rate * (error * error - self.variance)
        self.variance = min(max(bounded, ESTIMATOR.least_noise_sd**2), ESTIMATOR.most_noise_sd**2)
        self.covariance += ESTIMATOR.learning_rate * (error * self.last - self.covariance)
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
        return now - self.began_s >= min(ESTIMATOR.normal_s, self.began_s - self.since_s)


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
        self._doubted_s = now  # the first of those observations without which it would not be in doubt
        self._recent: deque[_Excursion] = deque(maxlen=ESTIMATOR.window)

    def sd(self, now: float | None = None) -> float:
        """Return the standard deviation, now or when it was last observed."""
        waited_s = 0.0 if now is None else max(now - self.at_s, 0.0)
        return sqrt(self.variance + self._prior.drift**2 * waited_s)

    @property
    def is_in_doubt(self) -> bool:
        """Return whether half of what a change takes has been seen."""
        return max(self._up, self._down) > ESTIMATOR.threshold / 2

    @property
    def doubted_s(self) -> float:
        """Return since when it is in doubt, infinity if it is not."""
        return self._doubted_s if self.is_in_doubt else inf

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
        if self.ended_unheard(now) > 0.5 and self._is_as_before(log_value - heard.offset):
            heard.count += 1
            self._end(self.changes[-1], now)
            return "ended"
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
        spread *= max(
            (ESTIMATOR.degrees_of_freedom + error * error / (self.variance + spread))
            / (ESTIMATOR.degrees_of_freedom + 1),
            1.0,
        )
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
            return self.changes[-1].mean, self.changes[-1].variance + ESTIMATOR.reset_sd**2
        return self.mean, self.sd(now) ** 2

    def _test(self, seen: _Excursion, step: float, alone: bool) -> bool:
        """Return whether the two-sided sum of errors says that the quantity has changed."""
        judges = self._prior.judge in (None, seen.stream)
        most = inf if alone or judges else ESTIMATOR.threshold / 2
        cut, step = min(max(seen.score, -ESTIMATOR.clip), ESTIMATOR.clip), min(step, 1.0)
        if not self.is_in_doubt:
            self._doubted_s = seen.at_s
        self._up = max(0.0, min(self._up + step * (cut - ESTIMATOR.slack), max(most, self._up)))
        self._down = max(0.0, min(self._down + step * (-cut - ESTIMATOR.slack), max(most, self._down)))
        if self._up == self._down == 0.0:
            self._recent.clear()
            return False
        self._recent.append(seen)
        if max(self._up, self._down) <= ESTIMATOR.threshold:
            return False
        # One stall is no change, nor one now and then: two runs have said so alike, or two of what may speak alone, and
        # with them most of what came since.
        judge, alike = None if alone else self._prior.judge, self._alike()
        since = [one for one in self._recent if one.at_s >= alike[0].at_s]
        loud = sum(one.score * self._sign >= ESTIMATOR.alarm and judge in (None, one.stream) for one in alike)
        return loud > 1 and 2 * len(alike) > len(since)

    @property
    def _sign(self) -> int:
        return 1 if self._up >= self._down else -1

    def _alike(self) -> list[_Excursion]:
        """Return what came since the sum of errors left 0 and says about the same as the last one."""
        last = self._recent[-1]
        within = [max(ESTIMATOR.same, 3 * hypot(one.sd, last.sd)) for one in self._recent]
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
        """A change has ended: what was known before it holds again."""
        age_s = max(now - ended.began_s, ended.found_age_s)
        self._ages.record(EndedChange(abs(self.mean - ended.mean), ended.found_age_s, age_s))
        self.mean, self.variance, self._since_s = (
            ended.mean,
            max(ended.variance, ESTIMATOR.restored_sd**2),
            ended.since_s,
        )
        self.at_s, self._up, self._down = now, 0.0, 0.0
        self._recent.clear()
        del self.changes[self.changes.index(ended) :]


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
