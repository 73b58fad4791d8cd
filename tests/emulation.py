"""What the tests on emulated hosts need: whether this machine can have any, names, what is left of them."""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.lab import cgroups, leftovers, network
from hepti_mqtt.lab.spec import LabSpec, parse

PATIENCE_S = 60.0


def why_not() -> str | None:
    """Return why this machine cannot have emulated hosts, None where it can."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    if missing := network.missing_tools():
        return f"emulated hosts need {missing}"
    try:
        cgroups.this_machine()
    except HeptiError as error:
        return str(error)
    name = f"hepti-try-{uuid.uuid4().hex[:8]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"namespaces cannot be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


REASON = why_not()
needs_emulation = pytest.mark.skipif(REASON is not None, reason=REASON or "")


def unique() -> str:
    return f"t{uuid.uuid4().hex[:10]}"


def small(name: str, **more: Any) -> LabSpec:
    return parse({"name": name, "rate": 100, "hosts": {"a": {}, "b": {}}, **more}, "test")


def left_of(name: str) -> list[str]:
    """Return what this machine still has of a lab."""
    groups = [str(p) for top in Path("/sys/fs/cgroup").glob("**/hepti/") for p in top.glob(f"{name}/")]
    spaces = [n for n in network.namespaces() if n.startswith(f"hepti-{name}-")]
    states = [str(leftovers.STATES / f"{name}.json")] if (leftovers.STATES / f"{name}.json").exists() else []
    return groups + spaces + states
