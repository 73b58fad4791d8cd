"""Site files: what simulate reads, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.profiles import PeerLink
from hepti_mqtt.errors import ConfigError

SITES = Path(__file__).parents[3] / "configs" / "sites"


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_site_can_be_read(path):
    cluster = load_site(path)
    assert set(cluster.devices) == set(cluster.links)
    assert all(p.speed(128) > 1e9 for p in cluster.devices.values())


def test_the_brokers_link_is_the_fastest_of_the_devices_unless_the_file_names_it(tmp_path):
    path = tmp_path / "site.yaml"
    text = "defaults: {gflops: 1}\ndevices: {a: {mbit: 100}, b: {mbit: 240}}\n"
    path.write_text(text)
    assert load_site(path).broker_bytes_per_s == 30e6
    path.write_text(text + "broker_mbit: 1000\n")
    assert load_site(path).broker_bytes_per_s == 125e6


def test_pairs_and_what_devices_say_of_their_network(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text(
        "defaults: {gflops: 1, mbit: 240, round_trip_ms: 2}\n"
        "devices: {a: {}, b: {mesh: false}, c: {shared: true, mbit: 80}}\n"
        "peers: [{between: [a, c], mbit: 40}, {between: [a, b], round_trip_ms: 1}]\n"
    )
    cluster = load_site(path)
    assert (cluster.endpoints, cluster.shared_medium) == ({"a", "c"}, {"c"})
    assert cluster.peer_links["a", "c"] == cluster.peer_links["c", "a"] == PeerLink(2e-3, 5e6)
    assert cluster.peer_links["b", "a"] == PeerLink(0.5e-3, 30e6)
    assert ("b", "c") not in cluster.peer_links


def test_few_rows_stream_the_weights():
    device = load_site(SITES / "four-pi4.yaml").devices["pi1"]
    assert device.linear[0].seconds(1) == device.linear[0].seconds(8)
    assert device.linear[0].seconds(512) == pytest.approx(2 * 512 * 2**20 / 24.6e9)


def test_frames_cost_what_agents_fitted_and_a_weaker_device_more(tmp_path):
    board, old = (load_site(SITES / "mixed-four-roomy.yaml").devices[name] for name in ("pi1", "old"))
    assert board.frame_seconds(1, 10**6, "mesh") == pytest.approx(5.1e-3)
    assert board.frame_seconds(1, 10**6) == pytest.approx(5.25e-3)
    assert old.frame_seconds(1, 10**6, "mesh") == pytest.approx(5.1e-3 * 24.6 / 12)
    path = tmp_path / "site.yaml"
    path.write_text("devices: {a: {gflops: 12, frame_ms: 0.2, frame_ms_per_mb: 3}}\n")
    assert load_site(path).devices["a"].frame_seconds(2, 10**6, "mesh") == pytest.approx(3.4e-3)


@pytest.mark.parametrize(
    "text",
    [
        "devices: {}",
        "[]",
        "devices: {a: {gflops: 1, colour: red}}",
        "devices: {a: {gflops: -1}}",
        "devices: {a: {gflops: .nan}}",
        "devices: {a: 5}",
        "{defaults: [1], devices: {a: {gflops: 1}}}",
        "devices: {a: {}}",
        "devices: {a: {gflops: 1, frame_ms_per_mb: none}}",
        "devices: {a: {gflops: 1, compute_watts: 3}}",
        "{deadline_ms: soon, devices: {a: {gflops: 1}}}",
        "devices: {A: {gflops: 1}}",
        "devices: {a: {gflops: 1}}\nlinks: {}",
        "devices: {a: {gflops: 1}}\nbroker_mbit: fast",
        "devices: {a: {gflops: 1, mesh: 0}}",
        "devices: {a: {gflops: 1}}\npeers: [{between: [a, b]}]",
        "devices: {a: {gflops: 1}}\npeers: {between: [a]}",
        "devices: {a: {gflops: 1}}\npeers: [{between: [[a], b]}]",
        "devices: {a: {gflops: 1}, b: {gflops: 1}}\npeers: [{between: [a, b], mbit: 0}]",
        "devices: {a: {gflops: 1}, b: {gflops: 1}}\npeers: [{between: [a, b], mb: 1}]",
        "devices: {a: ",
    ],
)
def test_wrong_files_are_told_what_is_wrong(tmp_path, text):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_site(path)
