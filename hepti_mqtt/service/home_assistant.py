"""Home Assistant integration: retained MQTT discovery, and states as JSON for its templates.

Each device, each model and the site have a discovery message at `<prefix>/device/<object id>/config`. It is published
when they appear, after each connection, and after Home Assistant's start. Obsolete messages of an earlier planner are
cleared. Source: Home Assistant, MQTT integration, device discovery.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import msgpack

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import CancelledRequestError, HeptiError, WireError
from hepti_mqtt.protocol.messages import (
    Heartbeat,
    Status,
    decode_heartbeat,
    decode_status,
    decode_use,
    missing_record_key,
)
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.transport.base import Connected, State
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

STATE_S: Final = 10.0  # between two states of a device: a state a second would fill Home Assistant's history
TICK_S: Final = 1.0  # between two updates of rates
RETAINED_S: Final = 2.0  # until retained messages have arrived after a connection
LONGEST_STATE: Final = 255  # characters of a state; Home Assistant shows a longer state as unknown
MINUTE_S: Final = 60.0
SHORT: Final = 2048  # bytes; a longer answer is not parsed for an error
_SPOKEN: Final = "transcription"  # not published as a state, so that the broker stores no speech
_LABELLED: Final = frozenset({"classification", "image_classification"})
RANKING: Final = "ranking"  # a classifier with one label has no label state
_MEASURED: Final = {"state_class": "measurement"}
_ORIGIN: Final = {"name": "Hepti", "sw_version": __version__}

Json = dict[str, Any]


# -- payloads ----------------------------------------------------------------------------------------------------------


class Payloads:
    """The discovery payloads of one site."""

    def __init__(self, topics: Topics, prefix: str) -> None:
        self._topics, self._prefix = topics, prefix
        self._site = f"hepti_{topics.site}"

    def config_topic(self, kind: str, name: str) -> str:
        """Return the discovery topic of a device, a model or the site."""
        return f"{self._prefix}/device/{self._object_id(kind, name)}/config"

    def all_configs(self) -> str:
        """Return the filter for every device discovery payload of the broker."""
        return f"{self._prefix}/device/+/config"

    def is_own(self, topic: str) -> bool:
        """Return whether a discovery topic belongs to this site."""
        object_id = topic.removeprefix(f"{self._prefix}/device/").partition("/")[0]
        return any(object_id.startswith(self._object_id(kind, "")) for kind in ("device", "model", "site"))

    def _object_id(self, kind: str, name: str) -> str:
        # Names of sites, devices and models have no capitals, so the kind in capitals separates them.
        return f"{self._site}_{kind.upper()}_{name}"

    def site(self) -> Json:
        """Return the payload of the site."""
        state = self._topics.home("site", "state")
        parts = {
            "devices": _sensor("Devices online", "devices_online", **_MEASURED),
            "last_event": _sensor("Last error", "last_error", entity_category="diagnostic"),
        }
        device = {"name": f"Hepti {self._topics.site}", "model": "site", "sw_version": __version__}
        return self._payload("site", "state", device, parts, state, self._topics.planner_status())

    def device(self, name: str, status: Status) -> Json:
        """Return the payload of a Hepti device."""
        parts: dict[str, Json] = {
            "load": _sensor("Other load", "load_percent", unit="%", **_MEASURED),
            "memory": _sensor("Free memory", "free_mib", unit="MiB", device_class="data_size", **_MEASURED),
            "temperature": _sensor("Temperature", "temperature_c", unit="°C", device_class="temperature", **_MEASURED),
            "slowdown": _sensor("Slowdown", "slowdown", entity_category="diagnostic", **_MEASURED),
            "round_trip": _sensor("Round trip", "round_trip_ms", unit="ms", device_class="duration", **_MEASURED),
            "share": _sensor("Share of the work", "share_percent", unit="%", **_MEASURED),
            "use": {
                "platform": "switch",
                "name": "Use for inference",
                "entity_category": "config",
                "command_topic": self._topics.use(name),
                "retain": True,  # for the time after the planner's end
                "payload_on": "on",
                "payload_off": "off",
                "value_template": "{{ value_json.use }}",
            },
            "version": {
                "platform": "update",
                "name": "Agent",
                "entity_category": "diagnostic",
                "value_template": "{{ {'installed_version': value_json.version, 'latest_version': "
                f"{__version__!r}}} | tojson }}}}",
            },
        }
        device = {"name": name, "model": "device", "sw_version": status.version or __version__}
        state, own = self._topics.home("device", name), self._topics.status(name)
        return self._payload("device", name, device, parts, state, own)

    def model(self, name: str, task: str) -> Json:
        """Return the payload of a served model; task: of its head."""
        parts = {
            "state": _sensor("State", "state", device_class="enum", options=["serving", "preparing", "no plan"]),
            "plan": {**_sensor("Plan", "plan", entity_category="diagnostic"), **self._attributes(name, "plan")},
            "latency": _sensor("Last latency", "latency_ms", unit="ms", **_MEASURED),
            "rate": _sensor("Requests a minute", "requests_per_minute", **_MEASURED),
        }
        if task in _LABELLED:
            parts["label"] = {**_sensor("Label", "label"), **self._attributes(name, "answer")}
        elif task == "generation":
            parts["text"] = {**_sensor("Text", "text"), **self._attributes(name, "answer")}
        device = {"name": f"Hepti {name}", "model": "model", "sw_version": __version__}
        state, planner = self._topics.home("model", name), self._topics.planner_status()
        return self._payload("model", name, device, parts, state, planner)

    def _attributes(self, model: str, key: str) -> Json:
        return {
            "json_attributes_topic": self._topics.home("model", model),
            "json_attributes_template": f"{{{{ value_json.{key}_attributes | default({{}}, true) | tojson }}}}",
        }

    def _payload(self, kind: str, name: str, device: Json, parts: Mapping[str, Json], state: str, status: str) -> Json:
        """Return a payload; state: topic of its state, status: topic of the process that must be online."""
        online = "{{ 'online' if value_json.state == 'online' else 'offline' }}"
        own = self._object_id(kind, name)
        device = {"identifiers": [own], "manufacturer": "Hepti", **device}
        if kind != "site":
            device["via_device"] = self._object_id("site", "state")
        components = {key: {**part, "unique_id": f"{own}_{key.upper()}"} for key, part in parts.items()}
        return {
            "device": device,
            "origin": _ORIGIN,
            "components": components,
            "state_topic": state,
            "availability": [{"topic": status, "value_template": online}],
            "qos": 1,
        }


def _sensor(name: str, key: str, *, unit: str | None = None, **more: Any) -> Json:
    component = {"platform": "sensor", "name": name, "value_template": f"{{{{ value_json.{key} }}}}", **more}
    return component if unit is None else {**component, "unit_of_measurement": unit}


# -- the state of the site ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Device:
    status: Status
    heartbeat: Heartbeat | None = None
    published_s: float = -inf


@dataclass(slots=True)
class _Model:
    record: Mapping[str, Any] | None = None
    latency_ms: float | None = None
    answered_s: deque[float] = field(default_factory=lambda: deque(maxlen=10_000))
    answer: Json = field(default_factory=dict)


class HomeAssistantSession:
    """State machine: messages of the site and of Home Assistant in, publications out; times in seconds.

    tasks: head task by served model.
    """

    def __init__(self, topics: Topics, prefix: str, tasks: Mapping[str, str]) -> None:
        self._topics, self._prefix, self._tasks = topics, prefix, dict(tasks)
        self._payloads = Payloads(topics, prefix)
        self._devices: dict[str, _Device] = {}
        self._unused: set[str] = set()  # devices switched off, including devices without status
        self._models = {name: _Model() for name in tasks}
        self._retained: dict[str, bytes] = {}  # published payloads by topic
        self._foreign: set[str] = set()  # discovery topics of this site from the broker
        self._settled_s = inf
        self._ticked_s = -inf
        self._error = ""

    def filters(self) -> list[tuple[str, int]]:
        """Return the topic filters, with the QoS."""
        t = self._topics
        own = [(t.all_status(), 1), (t.all_uses(), 1), (t.all_heartbeats(), 0), (t.all_plans(), 1)]
        return [*own, (f"{self._prefix}/status", 1), (self._payloads.all_configs(), 1)]

    def handle_connection(self, now: float) -> list[Publish]:
        """Publish all messages again, because the broker may have lost them."""
        self._settled_s = now + RETAINED_S
        self._retained.clear()
        return self._publish_all(now)

    def handle_message(self, topic: str, payload: bytes, now: float) -> list[Publish]:
        """Handle a message; ignore a malformed message, because the planner reports it."""
        if topic == f"{self._prefix}/status":
            if payload.strip().lower() != b"online":
                return []
            self._retained.clear()
            return self._publish_all(now)
        if topic.startswith(f"{self._prefix}/"):
            return self._handle_config(topic, payload)
        try:
            return self._handle_own(topic, payload, now)
        except WireError:
            return []

    def _handle_config(self, topic: str, payload: bytes) -> list[Publish]:
        if not self._payloads.is_own(topic):
            return []
        if payload:
            self._foreign.add(topic)
        else:
            self._foreign.discard(topic)
            if topic in self._retained:  # another client cleared it
                return self._forced(topic)
        return []

    def _forced(self, topic: str) -> list[Publish]:
        return [Publish(topic, self._retained[topic], 1, retain=True)]

    def _handle_own(self, topic: str, payload: bytes, now: float) -> list[Publish]:
        parsed = self._topics.parse(topic)
        if parsed.kind == "status":
            if not payload:
                return self._forget(parsed.device)
            status = decode_status(payload)
            previous = self._devices.get(parsed.device)
            self._devices[parsed.device] = _Device(status, previous.heartbeat if previous else None)
            return [*self._publish_device(parsed.device, now), *self._publish_site()]
        if parsed.kind == "use":
            (self._unused.discard if decode_use(payload) else self._unused.add)(parsed.device)
            return self._publish_device(parsed.device, now) if parsed.device in self._devices else []
        if parsed.kind == "heartbeat" and (device := self._devices.get(parsed.device)) is not None:
            device.heartbeat = decode_heartbeat(payload)
            due = now - device.published_s >= STATE_S
            return self._publish_device(parsed.device, now) if due else []
        if parsed.kind == "plan" and parsed.model in self._models:
            self._models[parsed.model].record = _record(payload)
            shares = [p for name in self._devices for p in self._publish_device(name, now)]
            return [*self._publish_model(parsed.model, now), *shares]
        return []

    def record_reply(self, model: str, latency_ms: float, payload: bytes, now: float) -> list[Publish]:
        """Update a model's state from an answer's JSON; parse only answers that become a state."""
        served = self._models[model]
        served.answered_s.append(now)
        read = self._tasks[model] in _LABELLED | {"generation"} or len(payload) < SHORT
        body: Json = json.loads(payload) if read else {"ok": True}
        if not body["ok"] and body["error"]["code"] != CancelledRequestError.code:  # a cancelled request is no error
            self._error = f"{model}: {body['error']['message']}"
            return self._publish_site()
        served.latency_ms = latency_ms
        served.answer = {} if self._tasks[model] == _SPOKEN else _answer(body.get("result"))
        return self._publish_model(model, now)

    def tick(self, now: float) -> list[Publish]:
        """Update rates once a second; clear obsolete discovery messages after retained messages have arrived."""
        if now - self._ticked_s < TICK_S:
            return []
        self._ticked_s = now
        out = [p for name in self._models for p in self._publish_model(name, now)]
        if now >= self._settled_s:
            self._settled_s = inf
            out += [Publish(topic, b"", 1, retain=True) for topic in sorted(self._foreign - self._retained.keys())]
        return out

    # -- publications -------------------------------------------------------------------------------------------------

    def _publish_all(self, now: float) -> list[Publish]:
        out = self._publish_site()
        for name in self._models:
            out += self._publish_model(name, now)
        for name in self._devices:
            out += self._publish_device(name, now)
        return out

    def _publish_site(self) -> list[Publish]:
        online = sum(device.status.state == "online" for device in self._devices.values())
        state = {"devices_online": online, "last_error": _short(self._error) or "none"}
        return [
            *self._retain(self._payloads.config_topic("site", "state"), self._payloads.site()),
            *self._retain(self._topics.home("site", "state"), state),
        ]

    def _publish_device(self, name: str, now: float) -> list[Publish]:
        device = self._devices[name]
        out = self._retain(self._payloads.config_topic("device", name), self._payloads.device(name, device.status))
        device.published_s, heartbeat = now, device.heartbeat
        state: Json = {
            "version": device.status.version,
            "use": "off" if name in self._unused else "on",
            "share_percent": round(100 * self._share(name), 1),
        }
        if heartbeat is not None:
            trip_s = heartbeat.round_trip_s
            state |= {
                "load_percent": round(100 * heartbeat.cpu_other, 1),
                "free_mib": heartbeat.free_bytes >> 20,
                "temperature_c": heartbeat.temperature_c,
                "slowdown": round(heartbeat.slowdown, 2),
                "round_trip_ms": None if trip_s is None else round(1e3 * trip_s, 2),
            }
        return out + self._retain(self._topics.home("device", name), state)

    def _share(self, device: str) -> float:
        """Return the device's mean share in the active plans."""
        active = [m.record["active"] for m in self._models.values() if m.record and m.record["active"]]
        return sum(_shares(plan).get(device, 0.0) for plan in active) / max(len(active), 1)

    def _publish_model(self, name: str, now: float) -> list[Publish]:
        model = self._models[name]
        while model.answered_s and now - model.answered_s[0] > MINUTE_S:
            model.answered_s.popleft()
        active = model.record["active"] if model.record else None
        preparing = model.record["preparing"] if model.record else None
        words = "none" if active is None else f"{active['strategy']} on {', '.join(active['devices'])}"
        state = {
            "state": "serving" if active else "preparing" if preparing else "no plan",
            "plan": _short(words),
            "plan_attributes": {} if active is None else {"reason": active["reason"], "shares": _shares(active)},
            "latency_ms": None if model.latency_ms is None else round(model.latency_ms, 1),
            "requests_per_minute": len(model.answered_s),
            **model.answer,
        }
        return [
            *self._retain(self._payloads.config_topic("model", name), self._payloads.model(name, self._tasks[name])),
            *self._retain(self._topics.home("model", name), state),
        ]

    def _forget(self, device: str) -> list[Publish]:
        """Remove a device after its retained status was cleared."""
        if self._devices.pop(device, None) is None:
            return []
        topics = (self._payloads.config_topic("device", device), self._topics.home("device", device))
        for topic in topics:
            self._retained.pop(topic, None)
        return [*(Publish(topic, b"", 1, retain=True) for topic in topics), *self._publish_site()]

    def _retain(self, topic: str, body: Json) -> list[Publish]:
        payload = json.dumps(body).encode()
        if self._retained.get(topic) == payload:
            return []
        self._retained[topic] = payload
        return self._forced(topic)


def _record(payload: bytes) -> Mapping[str, Any] | None:
    """Return the planner's record of a model's plans, None if the payload is invalid."""
    try:
        record = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException):
        return None
    return record if isinstance(record, Mapping) and missing_record_key(record) is None else None


def _shares(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of each device in the plan's first kind of divided work."""
    devices = plan["devices"]
    weights = next(iter(plan["weights"].values()), ()) if isinstance(plan.get("weights"), dict) else ()
    if len(weights) != len(devices) or not sum(weights):
        return {device: round(1 / len(devices), 3) for device in devices}
    return {device: round(w / sum(weights), 3) for device, w in zip(devices, weights, strict=True)}


def _answer(result: Any) -> Json:
    """Return the state and attributes of an answer, from the result of its last input."""
    last = result["results"][-1] if isinstance(result, Mapping) and result.get("results") else result
    if not isinstance(last, Mapping):
        return {}
    if labels := last.get("labels"):
        return {"label": _short(labels[0]["label"]), "answer_attributes": {"labels": labels}}
    if (text := last.get("text")) is not None:
        return {"text": _short(text), "answer_attributes": {"text": text}}
    return {}


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_STATE else text[: LONGEST_STATE - 1] + "…"


# -- the connection ----------------------------------------------------------------------------------------------------


class HomeAssistant:
    """The session with its own connection, so that it delays no request; callable on any thread."""

    def __init__(
        self,
        url: BrokerUrl,
        topics: Topics,
        prefix: str,
        tasks: Mapping[str, str],
        clock: Callable[[], float],
        report: Callable[[str], None],
    ) -> None:
        self._session, self._clock, self._report = HomeAssistantSession(topics, prefix, tasks), clock, report
        self._lock = threading.Lock()  # guards the session
        name = f"hepti-{topics.site}-planner-home"
        self._transport = BrokerConnection(
            url, name, on_message=self._handle_message, on_state=self._state, name="planner-home"
        )
        self._transport.subscribe(self._session.filters())
        #: Retained messages stay after `close`; the entities are unavailable while the planner is offline.
        self.connect, self.close = self._transport.connect, self._transport.close

    def tick(self) -> None:
        """Publish due updates."""
        self._do(lambda: self._session.tick(self._clock()))

    def record_reply(self, model: str, latency_ms: float, payload: bytes) -> None:
        """Update a model's state from an answer's JSON."""
        self._do(lambda: self._session.record_reply(model, latency_ms, payload, self._clock()))

    def _handle_message(self, topic: str, payload: bytes) -> None:
        self._do(lambda: self._session.handle_message(topic, payload, self._clock()))

    def _state(self, state: State) -> None:
        if isinstance(state, Connected):
            self._do(lambda: self._session.handle_connection(self._clock()))

    def _do(self, step: Callable[[], list[Publish]]) -> None:
        try:
            with self._lock:
                for message in step():
                    self._transport.publish(message.topic, message.payload, message.qos, message.retain)
        except HeptiError as error:  # the site serves without Home Assistant
            self._report(f"Home Assistant is not informed: {error}")
