"""A scripted planner, and what a planner tells: a record of plans, and an answer."""

from __future__ import annotations

import json
import queue

import msgpack
from site_processes import PATIENCE_S, Voice

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.protocol.messages import Status, encode_status
from hepti_mqtt.protocol.topics import Topics

A_PLAN = Plan("m", PlanVersion(1, 1), "single", ("a",), "a").to_dict()
NO_PLAN = {"ok": False, "error": {"code": "no_plan", "message": "no device is online", "detail": ""}}


def a_record(**data):
    """Return a record without plans, and with `data`."""
    empty = {"boot": 1, "active": None, "preparing": None, "spec": {}, "directory": "/m", "in_flight": 2, "error": None}
    lists = {name: [] for name in ("pinned", "pinned_preparing", "candidates", "story", "considered")}
    return {**empty, **lists, "reason": "", "unused": {}, "clocks": {}, "progress": {}, "evidence": {}, **data}


def an_answer(request, **data):
    """Return an answer that computed nothing, and with `data`."""
    plan = {"id": "1.1", "strategy": "single", "options": {}, "wire": "f32", "weights": "f32", "route": "broker"}
    counted = {"compute_ms": None, "wait_ms": None, "bytes_on_wire": None, "predicted_bytes": 0, "predicted_ms": 1.0}
    head = {"id": request, "model": "m", "ok": True, "result": None, "tokens": 1}
    return {**head, **counted, "plan": {**plan, "devices": {"a": 1.0}}, **data}


class Planner(Voice):
    """Hears requests and says what a test tells it to; acknowledges: them as they come."""

    def __init__(self, url, site, acknowledges=True):
        self.topics, self.asked = Topics(site), queue.SimpleQueue()
        on_delivery = None if acknowledges else lambda delivery: self.hear(delivery.topic, delivery.payload)
        super().__init__(url, self.topics.all_requests(), client_id=f"planner-{site}", on_delivery=on_delivery)

    def hear(self, topic, payload):
        self.asked.put((self.topics.parse(topic), json.loads(payload)))

    def next(self):
        return self.asked.get(timeout=PATIENCE_S)

    def say(self, topic, payload, retain=True):
        self.transport.publish(topic, payload, 1, retain)

    def online(self, boot=1):
        self.say(self.topics.planner_status(), encode_status(Status("online", boot)))

    def record(self, model="m", boot=1, active=None, error=None, **more):
        self.say(self.topics.plan(model), msgpack.packb(a_record(boot=boot, active=active, error=error, **more)))

    def respond(self, request, fields):
        parsed, body = request
        topic = self.topics.response(parsed.model, parsed.client, body["id"])
        self.say(topic, json.dumps(fields).encode(), retain=False)

    def answer(self, request, **data):
        parsed, body = request
        fields = an_answer(body["id"], model=parsed.model, result=body.get("text"))
        self.respond(request, fields | {**data, "plan": fields["plan"] | data.get("plan", {})})

    def part(self, request, **data):
        self.respond(request, {"id": request[1]["id"], "ok": True, "final": False, **data})
