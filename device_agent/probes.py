"""Probes: frames that a device sends to itself through the broker, or to a peer that answers each with a small one.

A link that carries several times less than before is believed to do so after a few large probes in a row, one second
apart: the shortest of those that are kept would hide it for as long as it is kept. It may have been others who used
the link meanwhile, so it is measured again soon after.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.protocol.frames import Frame, encode, frame_bytes
from hepti_mqtt.protocol.messages import LinkReport

SMALL_BYTES: Final = 64
LARGE_BYTES: Final = 256 << 10
KEPT_ROUND_TRIPS: Final = 10
# Of the shortest round trips that a large probe's is held against: those of all the time in which it was kept. Held
# against the last ones alone, a link that is full now looks fast.
KEPT_FOR_RATE: Final = 60
KEPT_LARGE: Final = 4
SHORTEST_S: Final = 2e-3  # extra time of a large probe below which it says more about the machine than about the link
FIRST_LARGE: Final = 8  # one after the other at the start, then rarely
FIRST_PROBES: Final = 32  # small and large, that follow each other quickly: the first plan depends on them
FIRST_EVERY_S: Final = 0.2  # between two of these
PROBE_S: Final = 1.0  # between two small probes
BUSY_S: Final = 1.0  # after the last op, without large probes
LARGE_EVERY_S: Final = 10.0
SLOW_RATIO: Final = 2.0  # a large probe slower than the fastest by this factor puts the rate in doubt ...
SLOW_S: Final = 6e-3  # ... unless its bytes took less than this for each way: a busy device answers so late by itself
CONFIRMATIONS: Final = 3  # slow probes in a row that are no accident
RECHECK_S: Final = 1.0  # until the next large probe of a rate in doubt
RECHECKS: Final = 3  # early large probes after a fall: a plan made for a false one lasts a minute
RECHECK_EVERY_S: Final = 2.0
MAX_PENDING: Final = 16
PACKET_MARGIN: Final = 1024  # topic and fixed header


class _PendingProbe(NamedTuple):
    """A probe that is not answered yet; paired: a small one before a large one."""

    at_s: float
    nbytes: int
    busy: bool
    paired: bool


class Prober:
    """Makes probes and reads the answers; the time is an argument.

    hops: how often the bytes of a large probe pass the way that is measured. large_every_s: between two large ones.
    bandwidth_drops: how often the rate fell at once. May be called from several threads.
    """

    def __init__(self, device: str, boot: int, hops: int = 2, large_every_s: float = LARGE_EVERY_S) -> None:
        self._device, self._travels, self._large_every_s = device, hops, large_every_s
        self._epoch = PlanVersion(boot, 0)
        self._large_bytes = LARGE_BYTES
        self._sequence = 0
        self._large_sent = 0
        self._large_at_s = float("-inf")
        self._sent: OrderedDict[int, _PendingProbe] = OrderedDict()
        self._beside_s = 0.0  # what the small probe took that went just before the last large one
        self._small: deque[float] = deque(maxlen=KEPT_FOR_RATE)
        self._large: deque[float] = deque(maxlen=KEPT_LARGE)
        self._slow_ones: list[float] = []  # in a row
        self._doubts = CONFIRMATIONS
        self._checks = 0  # that are left of a fall
        self.bandwidth_drops = 0
        self._lock = threading.Lock()  # guards what is sent and what has come

    def set_packet_limit(self, largest_packet_bytes: int | None, local: bool = False) -> None:
        """Keep large probes below what the broker takes, None if it names no limit; make none to a `local` broker.

        On the broker's machine there is no link: what a large probe took would be the processor's time, which is in
        the curves already.
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
        """Return the payloads to publish now: each second a small probe, and rarely, when not `busy`, a large one."""
        with self._lock:
            small = self._make(SMALL_BYTES, now, busy)
        return [small] if busy else [small, *self.due_large_probe(now, busy)]

    def due_large_probe(self, now: float, busy: bool) -> list[bytes]:
        """Return the large probe to publish now, if one is due, behind a small one.

        busy: between two runs. Then one that takes a little longer says nothing: somebody may still compute. What holds
        up the small one, a busy broker or this device itself, is not the link.
        """
        with self._lock:
            rarely_s = RECHECK_EVERY_S if self._checks else self._large_every_s
            every_s = 0.0 if self._large_sent < FIRST_LARGE else RECHECK_S if self._slow_ones else rarely_s
            if not self._small or now - self._large_at_s < every_s or self._large_bytes <= 16 * SMALL_BYTES:
                return []
            self._large_sent += 1
            self._checks = max(self._checks - 1, 0)
            self._large_at_s = now
            self._beside_s = 0.0
            beside = self._make(SMALL_BYTES, now, busy, beside=True)
            return [beside, self._make(self._large_bytes, now, busy)]

    def expect_slower(self) -> None:
        """Expect a slower link: probe again now and accept the first slow result."""
        with self._lock:
            self._doubts, self._large_at_s = 1, float("-inf")

    def on_answer(self, frame: Frame, now: float) -> None:
        """Record an answer; ignores answers that are late or of an earlier start."""
        with self._lock:
            sent = self._sent.pop(frame.part, None) if frame.plan_version == self._epoch else None
            if sent is None:
                return
            if sent.paired:  # it found threads awake, so it is none of the round trips
                self._beside_s = now - sent.at_s
            elif sent.nbytes == SMALL_BYTES:
                self._small.append(now - sent.at_s)
            else:
                self._took(now - sent.at_s, sent.busy)

    def _took(self, seconds: float, busy: bool) -> None:
        """Keep what a large probe took; forget faster ones once that is the last of several slow ones in a row."""
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
        """Return whether the bytes of a large probe took much longer than those of the shortest that is kept."""
        if not self._small or not self._large:
            return False
        small_s = min(self._small)
        usual_s = max(min(self._large) - small_s, SHORTEST_S)
        return seconds - max(small_s, self._beside_s) > max(SLOW_RATIO * usual_s, SLOW_S * self._travels)

    def round_trip_s(self) -> float | None:
        """Return the shortest of the last round trips of a small probe, or None.

        The shortest, for a device that computes answers late, and what its work costs is in its curves already. Of
        probes a second apart: they find threads asleep, as the frames of a request find some of them. With probes that
        each follow the answer before, splits on one machine were predicted at a quarter of what they took.
        """
        return min(tuple(self._small)[-KEPT_ROUND_TRIPS:]) if self._small else None

    def bandwidth_bytes_per_s(self) -> float | None:
        """Return the rate of one direction, or None where it cannot be measured or is too high to matter.

        The broker has the whole message before it passes it on, so the extra bytes of a large probe travel twice; a
        peer answers with a small one. The shortest times count: whatever delays a probe besides the link makes it
        longer.
        """
        if not self._small or not self._large:
            return None
        extra_s = min(tuple(self._large)) - min(tuple(self._small))
        return self._travels * (self._large_bytes - SMALL_BYTES) / extra_s if extra_s > SHORTEST_S else None

    def _make(self, nbytes: int, now: float, busy: bool, beside: bool = False) -> bytes:
        self._sequence += 1
        self._sent[self._sequence] = _PendingProbe(now, nbytes, busy, beside)
        while len(self._sent) > MAX_PENDING:
            self._sent.popitem(last=False)
        frame = Frame(
            "probe",
            "",
            self._epoch,
            0,
            source=self._device,
            part=self._sequence,
            shape=(nbytes,),
            body=bytes(nbytes),
        )
        return encode(frame)


# ----------------------------------------------------------------------------------------------------------------------
# Probes between peers that hear each other: one peer at a time, in turn, so that they are few and spread in time.


PEER_LARGE_EVERY_S: Final = 30.0  # to each peer
ANSWER_MARK: Final = (1,)  # the numbers of a probe that answers another one


class PeerProbes:
    """One prober per peer; the time is an argument. Reports may be read from any thread."""

    def __init__(self, device: str, boot: int) -> None:
        self._device, self._boot = device, boot
        self._probers: dict[str, Prober] = {}
        self._turn = 0

    def due(self, now: float, peers: Collection[str], busy: bool) -> tuple[str, list[bytes]] | None:
        """Return whom to probe now, with what; None without peers. busy: no large probes."""
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
        """Return what measures the way to each peer that has been probed."""
        return self._probers

    def answer(self, probe: Frame) -> Frame:
        """Return what answers a peer's probe."""
        return Frame(
            "probe", "", PlanVersion(*probe.plan_version), 0, source=self._device, part=probe.part, numbers=ANSWER_MARK
        )

    def on_answer(self, peer: str, frame: Frame, now: float) -> None:
        """Take a peer's answer."""
        if (prober := self._probers.get(peer)) is not None:
            prober.on_answer(frame, now)

    def link_reports(self) -> Mapping[str, LinkReport]:
        """Return what was measured so far."""
        found = {}
        for peer, prober in list(self._probers.items()):
            round_trip_s = prober.round_trip_s()
            if round_trip_s is not None:
                found[peer] = LinkReport(round_trip_s, prober.bandwidth_bytes_per_s())
        return found
