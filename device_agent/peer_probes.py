"""Probes between peers that hear each other: one peer at a time, in turn, so that they are few and spread in time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from device_agent.probe import Prober
from hepti_mqtt.ids import Epoch
from hepti_mqtt.wire.frames import Frame
from hepti_mqtt.wire.peers import LinkReport

LARGE_EVERY_S: Final = 30.0  # to each peer
ANSWER: Final = (1,)  # the numbers of a probe that answers another one


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
            prober = self._probers[peer] = Prober(self._device, self._boot, 1, LARGE_EVERY_S)
        return peer, prober.due(now, busy)

    def probers(self) -> Mapping[str, Prober]:
        """Return what measures the way to each peer that has been probed."""
        return self._probers

    def answer(self, probe: Frame) -> Frame:
        """Return what answers a peer's probe."""
        return Frame("probe", "", Epoch(*probe.epoch), 0, source=self._device, part=probe.part, numbers=ANSWER)

    def received(self, peer: str, frame: Frame, now: float) -> None:
        """Take a peer's answer."""
        if (prober := self._probers.get(peer)) is not None:
            prober.received(frame, now)

    def reports(self) -> Mapping[str, LinkReport]:
        """Return what was measured so far."""
        found = {}
        for peer, prober in list(self._probers.items()):
            round_trip_s = prober.round_trip_s()
            if round_trip_s is not None:
                found[peer] = LinkReport(round_trip_s, prober.bandwidth_bytes_per_s())
        return found
