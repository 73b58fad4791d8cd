"""Site files: valid files, defaults and mistakes."""

import json
from pathlib import Path

import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.sites import boards, find_site, load_site
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.profiles import Cluster, Link, PeerLink
from hepti_mqtt.core.storage import PRODUCTS
from hepti_mqtt.cost.reported import profile_from_caps
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models import quantised, representative_shape
from hepti_mqtt.planner import Question, decide

SITES = Path(__file__).parents[3] / "configs" / "sites"
#: What an agent measured of itself: one core of a server with AVX-512.
AGENT = profile_from_caps(
    "agent", json.loads((Path(__file__).parents[2] / "golden" / "agent-curves.json").read_text()), 2.0**32, 1.0
)


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_site_can_be_read(path):
    cluster = load_site(path)
    assert set(cluster.devices) == set(cluster.links)
    assert all(p.speed(128) > 1e9 for p in cluster.devices.values())


def test_links_of_pairs_and_network_flags_of_devices(tmp_path):
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
    assert cluster.broker_bytes_per_s == 30e6, "as fast as the fastest device"
    path.write_text(path.read_text() + "broker_mbit: 1000\n")
    assert load_site(path).broker_bytes_per_s == 125e6


@pytest.mark.parametrize(
    ("board", "network"),
    [*((board, "") for board in boards()), *(("pi4-4gb", network) for network in ("-wifi", "-100mbit", "-gigabit"))],
)
def test_a_site_is_named_by_count_and_board(board, network):
    cluster = find_site(Path(f"three-{board}{network}"))
    assert list(cluster.devices) == [f"{board}-{n}" for n in (1, 2, 3)]
    assert list(find_site(Path(f"3-{board}")).devices) == list(cluster.devices)
    if network == "-wifi":
        assert cluster.shared_medium == {*cluster.devices}


def test_a_device_of_a_board_has_its_numbers_unless_it_states_its_own(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text("devices: {a: {board: pi4-4gb}, b: {board: pi4-4gb, memory_mib: 100}}")
    a, b = load_site(path).devices.values()
    assert a.speed(128) == b.speed(128) == pytest.approx(24e9)
    assert b.memory_bytes == 100 * 2**20 < a.memory_bytes
    path.write_text("{defaults: {board: pi5-8gb}, devices: {a: {}, b: {board: pi4-4gb}}}")
    a, b = load_site(path).devices.values()
    assert a.speed(128) > 2 * b.speed(128)


@pytest.mark.parametrize("name", ["four-pi6", "zero-pi4-4gb", "four-pi5-8gb-5g", "nosuch"])
def test_an_unknown_site_is_refused(name):
    with pytest.raises(ConfigError):
        find_site(Path(name))


@pytest.fixture
def described(tmp_path):
    """Return a site file's profile of the agent, from three numbers."""
    path = tmp_path / "site.yaml"
    path.write_text("devices: {agent: {gflops: 113, int8_gflops: 225, memory_gb_per_s: 25}}")
    return load_site(path).devices["agent"]


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_a_described_device_takes_as_long_as_the_agent_per_storage(described, product, rows):
    assert described.speed(rows, product) / AGENT.speed(rows, product) == pytest.approx(1, rel=0.55)


def step_s(profile, weights):
    spec = spec_of_kind("smollm2-135m")
    spec = quantised(spec, weights) if weights else spec
    site = Cluster({"agent": profile}, {"agent": Link()})
    question = Question(TopicNames("home", "m"), spec, site, representative_shape(spec, 1, 1), PlanVersion(1, 1))
    return decide(question).chosen.price.seconds


def test_a_decoders_step_costs_the_bytes_of_its_weights_as_on_the_agent(described):
    times = {weights: step_s(described, weights) for weights in (None, "q8", "q4")}
    assert times[None] > 2 * times["q8"] > 2.5 * times["q4"]
    for weights, seconds in times.items():
        assert seconds == pytest.approx(step_s(AGENT, weights), rel=0.4)


def test_a_storage_may_have_rates_of_its_own(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text("devices: {a: {gflops: 10, storages: {q4_0: {gflops: 5, memory_gb_per_s: 1}}}}")
    device = load_site(path).devices["a"]
    speeds = {p.weights: device.speed(512, p) for p in PRODUCTS if not p.rounded}
    assert speeds["q4_0"] == pytest.approx(speeds["q4_1"] / 2)
    assert speeds["f32"] == pytest.approx(10e9)


def test_frames_cost_what_a_site_says_and_a_weaker_device_more(tmp_path):
    board, old = (load_site(SITES / "mixed-four-roomy.yaml").devices[name] for name in ("pi1", "old"))
    assert old.frame_seconds(1, 10**6, "mesh") > board.frame_seconds(1, 10**6, "mesh")
    path = tmp_path / "site.yaml"
    path.write_text("devices: {a: {gflops: 12, frame_ms: 0.2, frame_ms_per_mb: 3}}\n")
    assert load_site(path).devices["a"].frame_seconds(2, 10**6, "mesh") == pytest.approx(3.4e-3)


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "devices: {}", "devices: {a: ", "devices: {A: {gflops: 1}}"),
        *(f"devices: {{a: {fields}}}" for fields in ("5", "{}", "{gflops: -1}", "{gflops: .nan}", "{board: pi9}")),
        *(
            f"devices: {{a: {{gflops: 1, {field}}}}}"
            for field in (
                *("colour: red", "frame_ms_per_mb: none", "compute_watts: 3", "mesh: 0", "int8_gflops: 0"),
                *("storages: {q3: {gflops: 1}}", "storages: {q4_0: {mbit: 1}}"),
            )
        ),
        *(
            f"devices: {{a: {{gflops: 1}}, b: {{gflops: 1}}}}\n{line}"
            for line in (
                *("links: {}", "broker_mbit: fast", "deadline_ms: soon", "defaults: [1]"),
                *("peers: [{between: [a, c]}]", "peers: {between: [a]}", "peers: [{between: [[a], b]}]"),
                *("peers: [{between: [a, b], mbit: 0}]", "peers: [{between: [a, b], mb: 1}]"),
            )
        ),
    ],
)
def test_a_wrong_site_file_is_a_config_error(tmp_path, text):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_site(path)
