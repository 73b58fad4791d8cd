"""What arrives from the broker, decoded on the network thread and put where it is dealt with."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from hepti_mqtt.errors import WireError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol import messages as protocol_messages
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.plausible import MAX_BOOT
from hepti_mqtt.protocol.topics import ParsedTopic, Topics
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.transport import Delivery

_log: Final = logging.getLogger("hepti.planner")
TOLD: Final = 64  # devices whose caps cannot be read that are told of
DISBELIEVED: Final = 64  # topics with impossible boot counters that are told of


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A user's request, unread; delivery: how it came, None where nobody keeps it for us."""

    model: str
    client: str
    payload: bytes
    delivery: Delivery | None = None


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """A planner's retained status: our own, or another's."""

    status: protocol_messages.Status


@dataclass(frozen=True, slots=True)
class RetainedPlan:
    """A model's retained record: our own, or one that an earlier planner left behind."""

    model: str


@dataclass(frozen=True, slots=True)
class ImplausibleBoot:
    """A status, caps or heartbeat with a boot counter that no start can have: forged, or of a clock that is wrong."""

    topic: str
    kind: str
    boot: int


class ImplausibleBootLog:
    """Tells the log once of each topic with an impossible boot counter, of a bounded number of topics."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()

    def warn_once(self, arrival: ImplausibleBoot) -> None:
        """Tell of what was ignored."""
        if arrival.topic in self._told or len(self._told) >= DISBELIEVED:
            return
        self._told.add(arrival.topic)
        self._log.warning(
            "ignored what %s says: boot counter %d is of a time that has not come; clear the topic if it was forged, "
            "or set the clock there and remove the file `boot` of its state",
            arrival.topic,
            arrival.boot,
        )


DecodedMessage = (
    interface.DeviceStatus
    | interface.DeviceCaps
    | interface.DeviceHeartbeat
    | interface.DeviceMessage
    | interface.DeviceFrame
    | RawRequest
    | PlannerStatus
    | RetainedPlan
    | ImplausibleBoot
)


def is_droppable(arrival: DecodedMessage) -> bool:
    """Return whether a message is soon followed by another one that says the same: only such may be dropped.

    Nobody repeats a will, an output, what a device counted of a run, or what becomes of a plan.
    """
    match arrival:
        case interface.DeviceHeartbeat() | interface.DeviceMessage(message=messages.PrepareProgress()):
            return True
        case _:
            return False


class MessageDecoder:
    """Topics and payloads to arrivals; what is not valid is counted and dropped.

    latest_boot: returns the highest boot counter that is believed now.
    """

    def __init__(self, site: str, latest_boot: Callable[[], int] = lambda: MAX_BOOT) -> None:
        self.topics = Topics(site)
        self._latest_boot = latest_boot
        self.counters: Counter[str] = Counter()
        self._told: set[str] = set()
        self._decoders: Mapping[str, Callable[[ParsedTopic, bytes], DecodedMessage]] = {
            "status": _status,
            "caps": _caps,
            "heartbeat": _heartbeat,
            "up": _up,
            "request": lambda topic, payload: RawRequest(topic.model, topic.client, payload),
            "planner_status": lambda _, payload: PlannerStatus(messages.decode_status(payload)),
            "plan": lambda topic, _: RetainedPlan(topic.model),
        }

    def filters(self) -> list[tuple[str, int]]:
        """Return what the planner subscribes to beside requests, with the QoS of each."""
        t = self.topics
        return [
            (t.all_status(), 1),
            (t.all_caps(), 1),
            (t.all_heartbeats(), 0),
            (t.all_reports(), 1),
            (t.planner_status(), 1),
            (t.all_plans(), 1),
        ]

    def requests(self) -> list[tuple[str, int]]:
        """Return what brings the planner requests."""
        return [(self.topics.all_requests(), 1)]

    def decode(self, topic: str, payload: bytes) -> DecodedMessage | None:
        """Return what a message says, None if it is empty (a retained one that was cleared) or not valid."""
        if not payload:
            return None
        parsed = None
        try:
            parsed = self.topics.parse(topic)
            decoder = self._decoders.get(parsed.kind)
            if decoder is None:
                self.counters["foreign"] += 1
                return None
            arrival = decoder(parsed, payload)
        except WireError as error:
            self.counters["malformed"] += 1
            if parsed is not None and parsed.kind == "caps":
                self._unread(parsed.device, error)
            return None
        boot = _boot(arrival)
        if boot <= self._latest_boot():
            return arrival
        self.counters["implausible_boot"] += 1
        return ImplausibleBoot(topic, parsed.kind, boot)

    def _unread(self, device: str, error: WireError) -> None:
        """Tell once of a device that no plan can use; names cost nothing to invent, so of a bounded number of them."""
        if device not in self._told and len(self._told) < TOLD:
            self._told.add(device)
            _log.warning("refused: the caps of %s cannot be read (%s); update the agent there", device, error)


def _boot(arrival: DecodedMessage) -> int:
    """Return the boot counter that a message names, 0 if it names none."""
    match arrival:
        case interface.DeviceStatus(status=said) | PlannerStatus(status=said):
            return said.boot
        case interface.DeviceCaps(caps=caps):
            return caps.boot
        case interface.DeviceHeartbeat(heartbeat=heartbeat):
            return heartbeat.boot
        case _:
            return 0


def _status(topic: ParsedTopic, payload: bytes) -> DecodedMessage:
    return interface.DeviceStatus(topic.device, messages.decode_status(payload))


def _caps(topic: ParsedTopic, payload: bytes) -> DecodedMessage:
    caps = messages.decode_caps(payload)
    if caps.device != topic.device:
        raise WireError(f"caps of {caps.device} on the topic of {topic.device}")
    return interface.DeviceCaps(topic.device, caps)


def _heartbeat(topic: ParsedTopic, payload: bytes) -> DecodedMessage:
    return interface.DeviceHeartbeat(topic.device, messages.decode_heartbeat(payload))


def _up(topic: ParsedTopic, payload: bytes) -> DecodedMessage:
    message = messages.decode_report(payload)
    if isinstance(message, Frame):
        return interface.DeviceFrame(topic.device, message)
    return interface.DeviceMessage(topic.device, message)
