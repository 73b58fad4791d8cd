"""Probes: frames that a device sends to itself through the broker, or to a peer that answers with a small frame.

After a few slow large probes in a row, one second apart, the older, faster ones are dropped: the minimum of all kept
probes would hide a slower link. Other traffic may have caused the slow ones, so the link is measured again soon.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.protocol.frames import Frame, encode, frame_bytes
from hepti_mqtt.protocol.messages import LinkReport

SMALL_BYTES: Final = 64
LARGE_BYTES: Final = 256 << 10
KEPT_ROUND_TRIPS: Final = 10
# Round trips: their minimum is subtracted from a large probe's. As old as the oldest large probe: recent ones alone
# would make a congested link look fast.
KEPT_FOR_RATE: Final = 60
KEPT_LARGE: Final = 4
SHORTEST_S: Final = 2e-3  # extra time of a large probe; below it the machine's noise is larger than the link's part
FIRST_LARGE: Final = 8  # in a row after the start, then rarely
FIRST_PROBES: Final = 32  # small and large, at a short interval: the first plan depends on them
FIRST_EVERY_S: Final = 0.2  # between two of these
PROBE_S: Final = 1.0  # between two small probes
BUSY_S: Final = 1.0  # after the last op, without large probes
LARGE_EVERY_S: Final = 10.0
SLOW_RATIO: Final = 2.0  # a large probe slower than the fastest by this factor puts the rate in doubt ...
SLOW_S: Final = 6e-3  # ... unless its bytes took less than this per hop: a busy device's answer is as late
CONFIRMATIONS: Final = 3  # slow probes in a row until the rate falls
RECHECK_S: Final = 1.0  # until the next large probe of a rate in doubt
RECHECKS: Final = 3  # early large probes after a fall: a plan for a false one lasts a minute
RECHECK_EVERY_S: Final = 2.0
MAX_PENDING: Final = 16
PACKET_MARGIN: Final = 1024  # topic and fixed header


class _PendingProbe(NamedTuple):
    """An unanswered probe; paired: a small one just before a large one."""

    at_s: float
    nbytes: int
    busy: bool
    paired: bool


class Prober:
    """Makes probes and reads the answers; the time is an argument.

    hops: how often a large probe's bytes cross the path. large_every_s: between two large ones. bandwidth_drops: how
    often the rate fell. Thread-safe.
    """

    def __init__(self, device: str, boot: int, hops: int = 2, large_every_s: float = LARGE_EVERY_S) -> None:
        self._device, self._travels, self._large_every_s = device, hops, large_every_s
        self._start = PlanVersion(boot, 0)
        self._large_bytes = LARGE_BYTES
        self._sequence = 0
        self._large_sent = 0
        self._large_at_s = float("-inf")
        self._sent = Recent[int, _PendingProbe](MAX_PENDING)
        self._paired_s = 0.0  # time of the small probe just before the last large one
        self._small: deque[float] = deque(maxlen=KEPT_FOR_RATE)
        self._large: deque[float] = deque(maxlen=KEPT_LARGE)
        self._slow_ones: list[float] = []  # in a row
        self._doubts = CONFIRMATIONS
        self._checks = 0  # that are left of a fall
        self.bandwidth_drops = 0
        self._lock = threading.Lock()  # guards pending and answered probes

    def set_packet_limit(self, largest_packet_bytes: int | None, local: bool = False) -> None:
        """Keep large probes below the broker's limit, None if it names none; send none to a `local` broker.

        On the broker's machine there is no link: a large probe would measure processor time, which is in the curves.
        """
        room = LARGE_BYTES if largest_packet_bytes is None else largest_packet_bytes - frame_bytes(PACKET_MARGIN)
        size = 0 if local else min(LARGE_BYTES, max(room, 0))
        if size != self._large_bytes:
            self._large_bytes = size
            self._large.clear()  # times of another size

    @property
    def interval_s(self) -> float:
        """Return the seconds from one small probe to the next."""
        return FIRST_EVERY_S if self._sequence < FIRST_PROBES else PROBE_S

    def due_probes(self, now: float, busy: bool) -> list[bytes]:
        """Return the payloads to publish now: a small probe and, if due and not `busy`, a large one."""
        with self._lock:
            small = self._make(SMALL_BYTES, now, busy)
        return [small] if busy else [small, *self.due_large_probe(now, busy)]

    def due_large_probe(self, now: float, busy: bool) -> list[bytes]:
        """Return the large probe to publish now, if due, after a small one; else [].

        busy: between two runs; other devices may still compute, so a slightly slower probe is ignored. The small probe
        measures delays by a busy broker or this device, which are not the link's.
        """
        with self._lock:
            rarely_s = RECHECK_EVERY_S if self._checks else self._large_every_s
            every_s = 0.0 if self._large_sent < FIRST_LARGE else RECHECK_S if self._slow_ones else rarely_s
            if not self._small or now - self._large_at_s < every_s or self._large_bytes <= 16 * SMALL_BYTES:
                return []
            self._large_sent += 1
            self._checks = max(self._checks - 1, 0)
            self._large_at_s = now
            self._paired_s = 0.0
            small = self._make(SMALL_BYTES, now, busy, paired=True)
            return [small, self._make(self._large_bytes, now, busy)]

    def expect_slower(self) -> None:
        """Expect a slower link: send a large probe next and accept the first slow result."""
        with self._lock:
            self._doubts, self._large_at_s = 1, float("-inf")

    def on_answer(self, frame: Frame, now: float) -> None:
        """Record an answer; ignore late answers and those to an earlier start."""
        with self._lock:
            sent = self._sent.pop(frame.part, None) if frame.plan_version == self._start else None
            if sent is None:
                return
            if sent.paired:  # it meets awake threads, so it is no round trip of an idle device
                self._paired_s = now - sent.at_s
            elif sent.nbytes == SMALL_BYTES:
                self._small.append(now - sent.at_s)
            else:
                self._took(now - sent.at_s, sent.busy)

    def _took(self, seconds: float, busy: bool) -> None:
        """Keep the time of a large probe; drop faster ones after several slow ones in a row."""
        if self._slow(seconds):
            self._slow_ones.append(seconds)
            if len(self._slow_ones) < self._doubts:
                return
            self.bandwidth_drops, self._checks = self.bandwidth_drops + 1, RECHECKS
            self._large.clear()
            self._large.extend(self._slow_ones)
        elif not busy or not self._large or seconds < min(self._large):
            self._large.append(seconds)
        self._slow_ones.clear()
        self._doubts = CONFIRMATIONS

    def _slow(self, seconds: float) -> bool:
        """Return whether a large probe's bytes took much longer than those of the fastest one kept."""
        if not self._small or not self._large:
            return False
        small_s = min(self._small)
        usual_s = max(min(self._large) - small_s, SHORTEST_S)
        return seconds - max(small_s, self._paired_s) > max(SLOW_RATIO * usual_s, SLOW_S * self._travels)

    def round_trip_s(self) -> float | None:
        """Return the shortest of the last round trips of a small probe, or None.

        The shortest, because a computing device answers late, and its work is in its curves. Probes are a second apart
        so that they meet sleeping threads, as some of a request's frames do. With probes sent right after the previous
        answer, splits on one machine were predicted at a quarter of their time.
        """
        return min(tuple(self._small)[-KEPT_ROUND_TRIPS:]) if self._small else None

    def bandwidth_bytes_per_s(self) -> float | None:
        """Return the rate of one direction, or None if it is not measured or too high to matter.

        The broker forwards whole messages, so the extra bytes of a large probe travel twice; a peer answers with a
        small frame. The shortest times count, because other delays only lengthen a probe.
        """
        if not self._small or not self._large:
            return None
        extra_s = min(tuple(self._large)) - min(tuple(self._small))
        return self._travels * (self._large_bytes - SMALL_BYTES) / extra_s if extra_s > SHORTEST_S else None

    def _make(self, nbytes: int, now: float, busy: bool, paired: bool = False) -> bytes:
        self._sequence += 1
        self._sent[self._sequence] = _PendingProbe(now, nbytes, busy, paired)
        shape, body = (nbytes,), bytes(nbytes)
        return encode(
            Frame("probe", "", self._start, 0, source=self._device, part=self._sequence, shape=shape, body=body)
        )


# ----------------------------------------------------------------------------------------------------------------------
# Probes between connected peers: one peer at a time, in turn, so that probes are few and spread in time.


PEER_LARGE_EVERY_S: Final = 30.0  # to each peer
ANSWER_MARK: Final = (1,)  # `numbers` of an answer to a probe


class PeerProbes:
    """One prober per peer; the time is an argument. Reports may be read from any thread."""

    def __init__(self, device: str, boot: int) -> None:
        self._device, self._boot = device, boot
        self._probers: dict[str, Prober] = {}
        self._turn = 0

    def due(self, now: float, peers: Collection[str], busy: bool) -> tuple[str, list[bytes]] | None:
        """Return the peer to probe now and the payloads; None without peers. busy: no large probes."""
        for gone in self._probers.keys() - set(peers):
            del self._probers[gone]
        if not peers:
            return None
        self._turn += 1
        peer = sorted(peers)[self._turn % len(peers)]
        prober = self._probers.get(peer)
        if prober is None:
            prober = self._probers[peer] = Prober(self._device, self._boot, 1, PEER_LARGE_EVERY_S)
        return peer, prober.due_probes(now, busy)

    def probers(self) -> Mapping[str, Prober]:
        """Return the prober of each peer."""
        return self._probers

    def answer(self, probe: Frame) -> Frame:
        """Return the answer to a peer's probe."""
        return Frame(
            "probe", "", PlanVersion(*probe.plan_version), 0, source=self._device, part=probe.part, numbers=ANSWER_MARK
        )

    def on_answer(self, peer: str, frame: Frame, now: float) -> None:
        """Record a peer's answer."""
        if (prober := self._probers.get(peer)) is not None:
            prober.on_answer(frame, now)

    def link_reports(self) -> Mapping[str, LinkReport]:
        """Return the measured round trip and rate of each peer."""
        measured = ((peer, prober, prober.round_trip_s()) for peer, prober in list(self._probers.items()))
        return {
            peer: LinkReport(round_trip_s, prober.bandwidth_bytes_per_s())
            for peer, prober, round_trip_s in measured
            if round_trip_s is not None
        }
