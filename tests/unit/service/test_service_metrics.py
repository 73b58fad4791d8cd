"""Prometheus: what is exposed can be parsed, keeps its conventions, and is what dashboard and alerts ask for."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scripted_site import everyone, settled

from hepti_mqtt.core.errors import NetworkError
from hepti_mqtt.protocol.messages import Heartbeat, PeerStats
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.service.metrics import OTHER, PlannerMetrics
from hepti_mqtt.transport.metrics import serve_device

CONFIGS = Path(__file__).parents[3] / "configs"
COUNTERS = {"control_published": 3, "data_received_bytes": 500, "data_lost": 1, "compute_us": 2_500_000, "late": 4}
EDGES = {"b": PeerStats(7, 900, 0, 0, 0, 2, 0, 1)}
BEAT = Heartbeat(
    1, 1, 0.25, 1 << 30, 61.5, 2e-3, 1e7, 1.25, 1 << 20, {**COUNTERS, "tile_bytes_received": 9}, edges=EDGES
)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text):
    """Return the samples by name and labels, and the type of each family."""
    families = list(text_string_to_metric_families(text))
    samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    return samples, {family.name: family.type for family in families}


def value(samples, name, **labels):
    return samples[name, frozenset(labels.items())]


@pytest.fixture
def planner():
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


def test_the_planner_counts_what_happened(planner):
    samples, types = parsed(generate_latest(planner.registry).decode())
    expected = [
        ("hepti_planner_request_seconds_count", 1, {"model": "m", "outcome": "ok"}),
        ("hepti_planner_request_seconds_bucket", 1, {"model": "m", "outcome": "ok", "le": "0.025"}),
        ("hepti_planner_request_seconds_count", 1, {"model": "m", "outcome": "deadline"}),
        ("hepti_planner_request_seconds_count", 100, {"model": OTHER, "outcome": "unknown_model"}),
        ("hepti_planner_plan_steps_total", 1, {"model": "m", "cause": "lost"}),
        ("hepti_planner_devices", 1, {"state": "usable"}),
        ("hepti_planner_dropped_total", 2, {"reason": "malformed"}),
        ("hepti_planner_unacknowledged_requests", 3, {}),
        ("hepti_device_edge_bytes_total", 900, {"device": "a", "source": "b"}),
        ("hepti_device_compute_seconds_total", 2.5, {"device": "a"}),
        ("hepti_device_events_total", 4, {"device": "a", "event": "late"}),
    ]
    assert [value(samples, name, **labels) for name, _, labels in expected] == [count for _, count, _ in expected]
    units = ("_ms", "_us", "_mb", "_mib", "_kb", "_percent", "_minutes", "_total")
    assert not [name for name in types if name.endswith(units)], "names by Prometheus' conventions"


def queries():
    panels = json.loads((CONFIGS / "grafana.json").read_text())["panels"]
    rules = yaml.safe_load((CONFIGS / "alerts.yaml").read_text())["groups"][0]["rules"]
    return [t["expr"] for panel in panels for t in panel["targets"]] + [rule["expr"] for rule in rules]


def test_dashboard_and_alerts_ask_for_what_there_is(planner):
    served = planner.serve(("127.0.0.1", 0))
    try:
        samples, _ = parsed(read(served))
    finally:
        served.close()
    labels = {}
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


def read(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
        return answer.read().decode()


def test_an_agent_serves_its_last_heartbeat_and_one_address_has_one_server():
    last = [None]
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
