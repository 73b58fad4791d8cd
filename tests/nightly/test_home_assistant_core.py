"""Discovery payloads under the schemas of Home Assistant's own code.

HEPTI_HOME_ASSISTANT names a Python that can import `homeassistant` and its MQTT integration, 2024.3 or later. Before
2024.12 there is no device discovery: there each component is checked with what it shares, as its platform reads it.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.home_assistant import Payloads

PYTHON = os.environ.get("HEPTI_HOME_ASSISTANT", "")
CHECK = """
import importlib, json, sys
for name, body in json.load(sys.stdin).items():
    parts = body.pop("components")
    for key, part in parts.items():
        platform = part.pop("platform")
        schema = importlib.import_module(f"homeassistant.components.mqtt.{platform}").DISCOVERY_SCHEMA
        try:
            schema({**body, **part})
        except Exception as error:
            sys.exit(f"{name}: {key}: {error!r}")
    print(name)
"""


@pytest.mark.skipif(not PYTHON, reason="HEPTI_HOME_ASSISTANT names no Python with Home Assistant")
def test_home_assistant_takes_every_payload():
    payloads = Payloads(Topics("home"), "homeassistant")
    bodies = {"site": payloads.site(), "device": payloads.device("pi-1", Status("online", 7, version="0.2.0"))}
    bodies |= {task: payloads.model("m", task) for task in ("embedding", "classification", "generation")}
    done = subprocess.run([PYTHON, "-c", CHECK], input=json.dumps(bodies), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(bodies)
