"""Pictures to send, requests answered without devices, and a plan of two devices."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace

import numpy as np
from PIL import Image
from swarm import profile_curve

from hepti_mqtt import models
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster, DeviceProfile, Link
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.strategies.plan_programs import make_plan

_PROFILE = DeviceProfile("any", profile_curve(1e9), 1e9, 1e9)
CLUSTER = Cluster({"a": _PROFILE, "b": _PROFILE}, {"a": Link(), "b": Link()})


def plan_for(spec, number=1, **predicted):
    template = Plan("bert", PlanVersion(9, number), "row", ("a", "b"), "a")
    plan = make_plan(spec, template, "row", {"variant": "kv"}, (3.0, 1.0))
    return replace(plan, predicted_s=0.004, **predicted)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def noise(width, height, mode="RGB"):
    rng = np.random.default_rng(0)
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    return Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8), mode=None)


def run(checkpoint, request):
    """Answer a request with the oracle in the devices' place, through JSON on both sides."""
    prepared = read_input(checkpoint, json.loads(json.dumps(request)))
    _, output = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    reply = decode_output(checkpoint, prepared, output)
    assert json.loads(json.dumps(reply, allow_nan=False)) == reply
    return reply
