"""Planner and agent warn once about an open broker that other machines reach."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
from site_processes import Site, poll

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.embedded_broker import start_broker


def outer_address() -> str:
    outer = [
        a.address
        for addresses in psutil.net_if_addrs().values()
        for a in addresses
        if a.family == socket.AF_INET and not a.address.startswith("127.")
    ]
    if not outer:
        pytest.skip("this machine has no address but the loopback one")
    return outer[0]


def test_planner_and_agent_say_it_once(tmp_path: Path) -> None:
    model = make_model("tiny-bert", tmp_path / "model", seed=3)
    with start_broker(address=outer_address()) as broker, Site(tmp_path, broker, {"tiny": model}) as site:
        site.planner()
        site.agent("a", "100MiB")
        poll(lambda: "serves tiny" in site.log("planner"), "the planner's start")
        poll(lambda: "is online" in site.log("a"), "the agent's start")
        for name in ("planner", "a"):
            assert site.log(name).count("OPEN BROKER") == 1
