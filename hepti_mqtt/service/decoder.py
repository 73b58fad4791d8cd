"""Decode messages from the broker, on the network thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.errors import WireError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.topics import ParsedTopic, Topics
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.transport.base import Delivery


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A user's unparsed request."""

    model: str
    client: str
    payload: bytes
    delivery: Delivery | None = None  #: None if the broker does not keep the request
    bare: bool = False  #: the payload is plain text instead of JSON
    site: str = ""  #: of the client, "" for the planner's own site


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """The retained status of this planner, or of another planner."""

    status: messages.Status


@dataclass(frozen=True, slots=True)
class RetainedPlan:
    """A model's undecoded retained record, of this planner or of an earlier planner."""

    model: str
    payload: bytes


DecodedMessage = (
    interface.DeviceStatus
    | interface.DeviceUse
    | interface.DeviceCaps
    | interface.DeviceHeartbeat
    | interface.DeviceMessage
    | interface.DeviceFrame
    | RawRequest
    | PlannerStatus
    | RetainedPlan
)


class MessageDecoder:
    """Decode topics and payloads to messages; count and drop invalid messages.

    shared: site of the requests shared with other planners, None without sharing.
    """

    def __init__(self, site: str, log: RateLimitedLog | None = None, shared: str | None = None) -> None:
        self.topics = Topics(site)
        self.shared = None if shared is None else Topics(shared)
        self.log = log or RateLimitedLog(logging.getLogger("hepti.planner"))
        self.counters = self.log.counters
        self._decoders: Mapping[str, Callable[[ParsedTopic, bytes], DecodedMessage | None]] = {
            "status": _status,
            "caps": _caps,
            "heartbeat": lambda topic, payload: interface.DeviceHeartbeat(
                topic.device, messages.decode_heartbeat(payload)
            ),
            "up": _up,
            "use": lambda topic, payload: interface.DeviceUse(topic.device, messages.decode_use(payload)),
            "request": lambda topic, payload: RawRequest(topic.model, topic.client, payload),
            "text": lambda topic, payload: RawRequest(topic.model, topic.client, payload, bare=True),
            "planner_status": lambda _, payload: PlannerStatus(messages.decode_status(payload)),
            "plan": lambda topic, payload: RetainedPlan(topic.model, payload),
        }

    def filters(self) -> list[tuple[str, int]]:
        """Return the subscriptions other than requests and heartbeats, with their QoS."""
        t = self.topics
        return [
            (t.all_status(), 1),
            (t.all_caps(), 1),
            (t.all_reports(), 1),
            (t.all_uses(), 1),
            (t.planner_status(), 1),
            (t.all_plans(), 1),
        ]

    def requests(self) -> list[tuple[str, int]]:
        """Return the subscriptions for requests."""
        return [(self.topics.all_requests(), 1), (self.topics.all_texts(), 1)]

    def topics_of(self, topic: str) -> Topics:
        """Return the topics of the site that a topic belongs to: the planner's own, or that of shared requests."""
        shared = self.shared
        return shared if shared is not None and topic.startswith(shared.request_root()) else self.topics

    def decode(self, topic: str, payload: bytes) -> DecodedMessage | None:
        """Return a decoded message; None if it is invalid, or empty (a cleared retained message)."""
        parsed = None
        try:
            parsed = self.topics_of(topic).parse(topic)
            if not payload and parsed.kind != "use":  # a cleared switch means on
                return None
            decoder = self._decoders.get(parsed.kind)
            if decoder is None:
                self.counters["foreign"] += 1
                return None
            message = decoder(parsed, payload)
        except WireError as error:
            if parsed is not None and parsed.kind == "caps":
                text = f"Refused {parsed.device}: its caps are not valid ({error}). Update its agent."
                self.log.warn_once("malformed", parsed.device, text)
            else:
                self.counters["malformed"] += 1
            return None
        if isinstance(message, RawRequest) and self.shared is not None and self.topics_of(topic) is self.shared:
            return replace(message, site=self.shared.site)
        return message


def _status(topic: ParsedTopic, payload: bytes) -> DecodedMessage | None:
    status = messages.decode_status(payload)
    return None if status == messages.QUESTION else interface.DeviceStatus(topic.device, status)


def _caps(topic: ParsedTopic, payload: bytes) -> DecodedMessage:
    caps = messages.decode_caps(payload)
    if caps.device != topic.device:
        raise WireError(f"caps of {caps.device} on the topic of {topic.device}")
    return interface.DeviceCaps(topic.device, caps)


def _up(topic: ParsedTopic, payload: bytes) -> DecodedMessage:
    message, seal = messages.decode_sealed_report(payload)
    if isinstance(message, Frame):
        return interface.DeviceFrame(topic.device, message)
    return interface.DeviceMessage(topic.device, message, seal)
