"""Prometheus: what is exposed can be parsed, keeps its conventions, and is what dashboard and alerts ask for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scripted_site import everyone, settled

from hepti_mqtt.config.options import metrics_address
from hepti_mqtt.errors import NetworkError
from hepti_mqtt.metrics import serve_device
from hepti_mqtt.protocol.messages import Heartbeat, PeerStats
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.service.metrics import OTHER, PlannerMetrics

CONFIGS = Path(__file__).parents[3] / "configs"
COUNTERS = {"control_published": 3, "data_received_bytes": 500, "data_lost": 1, "compute_us": 2_500_000, "late": 4}
EDGES = {"b": PeerStats(7, 900, 0, 0, 0, 2, 0, 1)}
BEAT = Heartbeat(
    1, 1, 0.25, 1 << 30, 61.5, 2e-3, 1e7, 1.25, 1 << 20, {**COUNTERS, "tile_bytes_received": 9}, edges=EDGES
)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> tuple[Samples, dict[str, str]]:
    """Return the samples by name and labels, and the type of each family."""
    families = list(text_string_to_metric_families(text))
    samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    return samples, {family.name: family.type for family in families}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.fixture
def planner() -> PlannerMetrics:
    """Return the metrics of a site that has answered, refused, and changed its plan."""
    metrics, site = PlannerMetrics(["m"], lambda: {"malformed": 2}), settled("a", "b", decider=everyone)
    site.event(interface.DeviceHeartbeat("a", BEAT))
    site.submit("r1")
    site.compute_us = 4000
    site.answer(1)
    stats = site.answers["r1"].stats
    metrics.record_answer("m", "ok", 0.02, stats)
    metrics.record_answer("m", "deadline", 3.0)
    for number in range(100):
        metrics.record_answer(f"invented-{number}", "unknown_model", 0.0)
    site.leave("b")
    metrics.look(site.session, 3, 10.0)
    return metrics


def test_the_planner_counts_what_happened(planner: PlannerMetrics) -> None:
    samples, _ = parsed(generate_latest(planner.registry).decode())
    assert value(samples, "hepti_planner_request_seconds_count", model="m", outcome="ok") == 1
    assert value(samples, "hepti_planner_request_seconds_bucket", model="m", outcome="ok", le="0.025") == 1
    assert value(samples, "hepti_planner_request_seconds_count", model="m", outcome="deadline") == 1
    assert value(samples, "hepti_planner_request_seconds_count", model=OTHER, outcome="unknown_model") == 100
    assert value(samples, "hepti_planner_plan_steps_total", model="m", cause="lost") == 1
    assert value(samples, "hepti_planner_devices", state="usable") == 1
    assert value(samples, "hepti_planner_dropped_total", reason="malformed") == 2
    assert value(samples, "hepti_planner_unacknowledged_requests") == 3
    assert value(samples, "hepti_device_edge_bytes_total", device="a", source="b") == 900
    assert value(samples, "hepti_device_compute_seconds_total", device="a") == 2.5
    assert value(samples, "hepti_device_events_total", device="a", event="late") == 4


def test_names_keep_prometheus_conventions(planner: PlannerMetrics) -> None:
    _, types = parsed(generate_latest(planner.registry).decode())
    units = ("_ms", "_us", "_mb", "_mib", "_kb", "_percent", "_minutes")
    for name, kind in types.items():
        assert re.fullmatch(r"hepti_(planner|device)_[a-z_]+", name), name
        assert not name.endswith(units), name
        assert kind in ("counter", "gauge", "histogram")
        assert not name.endswith("_total"), "a counter has its suffix in its samples alone"


def queries() -> list[str]:
    panels = json.loads((CONFIGS / "grafana.json").read_text())["panels"]
    rules = yaml.safe_load((CONFIGS / "alerts.yaml").read_text())["groups"][0]["rules"]
    return [t["expr"] for panel in panels for t in panel["targets"]] + [rule["expr"] for rule in rules]


def test_dashboard_and_alerts_ask_for_what_there_is(planner: PlannerMetrics) -> None:
    served = planner.serve(("127.0.0.1", 0))
    try:
        samples, _ = parsed(read(served))
    finally:
        served.close()
    labels: dict[str, set[str]] = {}
    for name, pairs in samples:
        labels.setdefault(name, set()).update(key for key, _ in pairs)
    metrics = queries()
    assert len(metrics) > 20
    for query in metrics:
        names = re.findall(r"hepti_\w+", query)
        assert names, query
        for name in names:
            assert name in labels, name
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(group.replace(" ", "").split(",")) <= set().union(*(labels[name] for name in names)), query


def read(server: Any) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def test_an_agent_serves_its_last_heartbeat_and_one_address_has_one_server() -> None:
    last: list[Heartbeat | None] = [None]
    served = serve_device(("127.0.0.1", 0), "a", lambda: last[0])
    try:
        assert "hepti_agent_info" in read(served)
        last[0] = BEAT
        samples, _ = parsed(read(served))
        assert value(samples, "hepti_device_temperature_celsius", device="a") == 61.5
        with pytest.raises(NetworkError):
            serve_device(("127.0.0.1", served.port), "b", lambda: None)
    finally:
        served.close()
    serve_device(("127.0.0.1", served.port), "b", lambda: None).close()


def test_nothing_of_it_is_imported_unless_it_is_asked_for() -> None:
    code = "import sys, device_agent.agent, hepti_mqtt.service.planner; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(("text", "address"), [("127.0.0.1:9301", ("127.0.0.1", 9301)), ("[::1]:9301", ("::1", 9301))])
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert metrics_address(text) == address
