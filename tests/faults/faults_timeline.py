"""What a site said to itself around a fault, as lines for people: why a silence was as long as it was.

Someone listens to everything but weights and the numbers between devices, and keeps a line of each message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import paho.mqtt.client as paho
from site_processes import SITE

from hepti_mqtt.errors import WireError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport import BrokerUrl

BEFORE_S = 0.3  # of a silence that is shown too
AFTER_S = 0.1
LINES = 120  # of one silence, at most
LETTERS = 160  # of one message
RECONNECT_S = (0.05, 0.2)
FILTERS = ("dev/+/status", "dev/+/cmd", "dev/+/up", "planner/status", "plan/+", "work/#", "infer/#")


@dataclass(frozen=True, order=True)
class Line:
    """What was said, or happened, at a time by time.monotonic()."""

    at_s: float
    text: str


class Listener:
    """Keeps what a site says; one that the broker has cut off comes back by itself."""

    def __init__(self, url: str) -> None:
        self.topics = Topics(SITE)
        self._lock = threading.Lock()
        self._lines: list[Line] = []
        self._steps: set[tuple[float, str, str]] = set()
        self._serving: frozenset[str] = frozenset()
        self._root = self.topics.planner_status().removesuffix("planner/status")
        place = BrokerUrl.parse(url)
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2, "listener")
        self._client.reconnect_delay_set(*RECONNECT_S)
        self._client.on_connect = lambda client, *_: client.subscribe([(self._root + f, 0) for f in FILTERS])
        self._client.on_message = self._heard
        self._client.connect(place.host, place.port, keepalive=10)
        self._client.loop_start()

    def note(self, text: str, at_s: float | None = None) -> None:
        """Keep a line that is no message."""
        with self._lock:
            self._lines.append(Line(time.monotonic() if at_s is None else at_s, text))

    def serving(self) -> frozenset[str]:
        """Return the devices of the plan that is active, none before one is."""
        with self._lock:
            return self._serving

    def between(self, start_s: float, end_s: float) -> list[Line]:
        """Return what was said in a time, in its order; the same several times in a row once, with its number."""
        with self._lock:
            inside = sorted(line for line in self._lines if start_s - BEFORE_S <= line.at_s <= end_s + AFTER_S)
        return list(together(inside))[:LINES]

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _heard(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        now = time.monotonic()
        parsed = self.topics.parse(message.topic)
        if parsed.kind == "plan":
            self._story(message.payload, now)
            return
        try:
            words = told(parsed.kind, message.payload)
            self.note(f"{message.topic.removeprefix(self._root)}{words and ': '}{words}", now)
        except WireError as error:
            self.note(f"{message.topic}: {error}", now)

    def _story(self, record: bytes, now: float) -> None:
        """Keep who serves, and the steps of plans that are new, at the time that the planner says."""
        behind_s, told = time.time() - now, msgpack.unpackb(record) if record else {}
        with self._lock:
            self._serving = frozenset((told.get("active") or {}).get("devices", ()))
        for step in told.get("story", ()):
            key = round(step["time"], 2), step["plan"], step["to"]  # the planner derives it anew for each record
            if key not in self._steps:
                self._steps.add(key)
                text = f"plan {step['plan']}: {step['from']} -> {step['to']} ({step['cause']})"
                self.note(text, step["time"] - behind_s)


def told(kind: str, payload: bytes) -> str:
    """Return in words what a message says, "" if its topic says enough; raises WireError if it cannot be read."""
    if kind in ("status", "planner_status"):
        return str(messages.decode_status(payload))
    if kind not in ("command", "up"):
        return ""
    message = messages.decode_report(payload) if kind == "up" else messages.decode(payload)
    if isinstance(message, Frame):
        return f"{message.kind} of run {message.run_id} under {message.plan_version}"
    return str(message)[:LETTERS]


def together(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines with those that say the same in a row as one, which says how many."""
    last: Line | None = None
    times = 0
    for line in [*lines, None]:
        if last is not None and line is not None and line.text == last.text:
            times += 1
            continue
        if last is not None:
            yield Line(last.at_s, f"{last.text} ({times} times)" if times > 1 else last.text)
        last, times = line, 1
