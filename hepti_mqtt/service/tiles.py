"""Publish requested tiles of weights to devices, one at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Final

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import HeptiError, ModelError, NetworkError, WeightsChangedError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.protocol.frames import Frame, encode
from hepti_mqtt.protocol.topics import Topics

PAUSE_S: Final = 0.01  # between attempts while the send queue is full

BACKGROUND_SHARE: Final = 0.1  # of a device's link during runs, unless a request of tiles has a larger share

_log = logging.getLogger(__name__)


class TilePace:
    """Due times of each device's next tile: limited during runs, immediate otherwise."""

    def __init__(self) -> None:
        self.serving = False  # whether runs are active
        self._rates: dict[str, float] = {}
        self._free_s: dict[str, float] = {}

    def set_rate(self, device: str, bytes_per_s: float) -> None:
        """Set the rate of tiles to a device during runs."""
        self._rates[device] = bytes_per_s

    def due_s(self, device: str) -> float:
        """Return the due time of a device's next tile, 0 for immediately."""
        return self._free_s.get(device, 0.0) if self.serving else 0.0

    def record(self, device: str, nbytes: int, now: float) -> None:
        """Record a tile to a device."""
        if (rate := self._rates.get(device)) is not None:
            self._free_s[device] = now + nbytes / rate


class TileServer:
    """Publish requested tiles: in order per device, round-robin across devices.

    On a slow link, a device waits for one tile per other device, not for all tiles, so the planner does not consider it
    hung. During runs, `TilePace` limits each device's rate. Devices forward tiles to each other, so each tile is
    requested once.

    publish(topic, payload): at QoS 1; raises NetworkError while its queue is full, which limits the tiles in memory.
    unreadable(model, device, error): called if reading the weights fails. changed(error): called if the weight files
    changed after the start; only a restart can read them. counters: of published and unknown tiles.
    """

    def __init__(
        self,
        site: str,
        boot: int,
        checkpoints: Mapping[str, Checkpoint],
        publish: Callable[[str, bytes], None],
        unreadable: Callable[[str, str, HeptiError], None],
        changed: Callable[[WeightsChangedError], None],
    ) -> None:
        self._topics = Topics(site)
        self._version = PlanVersion(boot, 0)
        self._checkpoints = checkpoints
        self._publish, self._unreadable, self._weights_changed = publish, unreadable, changed
        #: Models and hashes by device; the last served device is last.
        self._wanted: OrderedDict[str, OrderedDict[tuple[str, bytes], None]] = OrderedDict()
        self._pace = TilePace()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self.counters: Counter[str] = Counter()

    def ask(
        self, model: str, device: str, hashes: Iterable[bytes], bytes_per_s: float = inf, share: float = 0.0
    ) -> None:
        """Queue tiles for a device; callable on any thread.

        bytes_per_s: of its link. share: fraction of the link for tiles during runs.
        """
        with self._changed:
            self._pace.set_rate(device, max(share, BACKGROUND_SHARE) * bytes_per_s)
            self._wanted.setdefault(device, OrderedDict()).update(((model, digest), None) for digest in hashes)
            self._changed.notify()

    def set_serving(self, is_serving: bool) -> None:
        """Set whether runs are active; callable on any thread."""
        if is_serving != self._pace.serving:
            with self._changed:
                self._pace.serving = is_serving
                self._changed.notify()

    def run(self) -> None:
        """Publish requested tiles until `close`; the body of a thread."""
        while (wanted := self._next()) is not None:
            device, (model, digest) = wanted
            try:
                payload = self._payload(model, digest)
            except KeyError:
                self.counters["unknown"] += 1
                _log.warning("%s requested an unknown tile of %s; update its agent", device, model)
            except WeightsChangedError as error:
                self._weights_changed(error)
            except (HeptiError, OSError) as error:
                self.counters["unreadable"] += 1
                _log.warning("the weights of %s cannot be sent: %s", model, error)
                reason = error if isinstance(error, HeptiError) else ModelError(f"the weights cannot be read: {error}")
                self._unreadable(model, device, reason)
            else:
                self.counters["sent"] += 1
                self.counters["sent_bytes"] += len(payload)
                self._send(self._topics.weights(device), payload)
                with self._changed:
                    self._pace.record(device, len(payload), time.monotonic())

    def close(self) -> None:
        """End `run`."""
        with self._changed:
            self._closed.set()
            self._changed.notify()

    def _next(self) -> tuple[str, tuple[str, bytes]] | None:
        with self._changed:
            while (device := self._ready()) is None and not self._closed.is_set():
                due_s = min(map(self._pace.due_s, self._wanted), default=inf)
                self._changed.wait(None if due_s == inf else max(due_s - time.monotonic(), 0.0))
            if device is None or self._closed.is_set():
                return None
            wanted, _ = self._wanted[device].popitem(last=False)
            self._wanted.move_to_end(device)
            if not self._wanted[device]:
                del self._wanted[device]
            return device, wanted

    def _ready(self) -> str | None:
        """Return the next device that is due, or None."""
        now = time.monotonic()
        return next((device for device in self._wanted if self._pace.due_s(device) <= now), None)

    def _payload(self, model: str, digest: bytes) -> bytes:
        checkpoint = self._checkpoints[model]
        manifest = checkpoint.manifest
        body = manifest.encode() if digest == manifest.digest else checkpoint.tile(digest)
        return encode(Frame("tile", model, self._version, 0, shape=(len(body),), body=body))

    def _send(self, topic: str, payload: bytes) -> None:
        while not self._closed.is_set():
            try:
                self._publish(topic, payload)
            except NetworkError:
                self._closed.wait(PAUSE_S)
            else:
                return
