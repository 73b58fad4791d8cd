"""Slowdown: how the matmuls and frames of real requests compare with what this device measured of itself."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any, Final

from hepti_mqtt.cluster import profile_from_caps
from hepti_mqtt.kernels import works
from hepti_mqtt.program import Compute, Op, SlotSpec

METERED: Final = frozenset({"linear", "conv2d"})  # what is priced by the time curves of matmuls
IDLE_S: Final = 5.0
SMOOTHING: Final = 0.5  # part that the newest second has
SHORTEST_S: Final = 50e-6  # shorter ops say more about the interpreter than about the machine
SAMPLES: Final = 8192
OPS: Final = 8192
FRAMES: Final = 64  # tensors; the first of a plan say more about caches than about the way

Sample = tuple[Op, tuple[SlotSpec, ...], float]


class Meter:
    """Compares observed with predicted seconds of matmuls, those of convolutions too.

    The session thread only appends to `samples` (op, slots of its Program, seconds), one other thread calls `slowdown`
    and does all the arithmetic, so that a step costs the session thread one append. frames_s: how long the session
    thread was busy with frames from and to peers, which it adds up. curves: as measured.
    """

    def __init__(self, curves: dict[str, Any]) -> None:
        self.curves = curves
        self.slowdown_now = 1.0  # what `slowdown` last returned
        self.frames_s = 0.0
        self._frames_seen = self._frames_looked = (0.0, 0, 0)
        self._frames_idle_s = 0.0
        self._frame_value: float | None = None
        self._profile = profile_from_caps("self", curves, inf, 1.0)
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        # By identity: ops live as long as their templates, and are kept here so that no other takes their place.
        self._predicted: dict[int, tuple[Op, float]] = {}
        self._value = 1.0
        self._seen_s = -inf

    def measured(self, curves: dict[str, Any]) -> None:
        """Compare with another measurement from now on; any thread may call it."""
        self._profile, self.curves = profile_from_caps("self", curves, inf, 1.0), curves
        self._predicted = {}

    def slowdown(self, now: float) -> float:
        """Return observed over predicted time of late, smoothed over seconds; 1.0 when nothing has run for a while."""
        observed = predicted = 0.0
        while self.samples:
            op, slots, seconds = self.samples.popleft()
            expected = self._expected(op, slots)
            if expected >= SHORTEST_S:
                observed += seconds
                predicted += expected
        idle = now - self._seen_s > IDLE_S
        if predicted:
            ratio = observed / predicted
            self._value = ratio if idle else self._value + SMOOTHING * (ratio - self._value)
            self._seen_s = now
        elif idle:
            self._value = 1.0
        self.slowdown_now = self._value
        return self._value

    def frame_slowdown(self, frames: int, nbytes: int) -> float | None:
        """Return observed over predicted time of tensors over mesh of late, None before there were enough of them.

        frames, nbytes: of tensors that came and went since the start, each receiver counted; a network card, TLS or a
        link that is shaped cost time that no measurement on loopback shows. Probes between two looks do not count:
        they meet an idle device, and were told as half of what tensors cost.
        """
        now = (self.frames_s, frames, nbytes)
        if frames == self._frames_looked[1]:
            self._frames_idle_s += now[0] - self._frames_looked[0]
        self._frames_looked = now
        spent_s, more, more_bytes = (a - b for a, b in zip(now, self._frames_seen, strict=True))
        if more < FRAMES:
            return self._frame_value
        spent_s -= self._frames_idle_s
        self._frames_seen, self._frames_idle_s = now, 0.0
        profile = self._profile
        ratio = spent_s / (profile.mesh_frame_s * more + more_bytes / profile.mesh_copy_bytes_per_s)
        before = ratio if self._frame_value is None else self._frame_value
        self._frame_value = before + SMOOTHING * (ratio - before)
        return self._frame_value

    def _expected(self, op: Op, slots: tuple[SlotSpec, ...]) -> float:
        known = self._predicted.get(id(op))
        if known is not None:
            return known[1]
        seconds = self._profile.seconds(*works(op, slots)) if isinstance(op, Compute) else 0.0
        if len(self._predicted) >= OPS:
            self._predicted.clear()
        self._predicted[id(op)] = (op, seconds)
        return seconds
