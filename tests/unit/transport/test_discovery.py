"""Discovery by mDNS: valid announcements, the choice of a broker, and both over loopback."""

import contextlib
import socket
import sys

import pytest

from hepti_mqtt.cli.main import main
from hepti_mqtt.client import discovery
from hepti_mqtt.client.discovery import BROKERS, SITES, SPEECH, Found, announced
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.transport.url import BrokerUrl

LOOPBACK = ("127.0.0.1",)
HOME, ATTIC, LONE = Found("mqtt://a:1883", "home"), Found("mqtts://b:8883", "attic"), Found("mqtt://c:1883")


@pytest.mark.parametrize(
    ("brokers", "site", "chosen"),
    [
        ([HOME], None, HOME),
        ([HOME, HOME, LONE], None, HOME),
        ([HOME, ATTIC, LONE], "attic", ATTIC),
        ([LONE], "home", LONE),
        ([Found("mqtt://a:1883"), LONE, HOME], "cellar", LONE),
        ([], None, None),
        ([HOME, ATTIC], None, None),
        ([LONE, Found("mqtt://d:1883")], None, None),
        ([HOME], "attic", None),
    ],
)
def test_the_only_broker_is_chosen(brokers, site, chosen):
    if chosen is None:
        with pytest.raises(ConfigError):
            discovery.choose(brokers, site)
    else:
        assert discovery.choose(brokers, site) == chosen


def announcement(broker, site="home"):
    return discovery.read_announcement(SITES, ["192.168.1.7"], 0, {b"broker": broker.encode(), b"site": site.encode()})


def test_an_invalid_announcement_is_ignored():
    assert announcement("mqtts://hub.lan") == Found("mqtts://hub.lan:8883", "home")
    for broker in ("", "hub.lan", "/etc/passwd", "http://hub.lan", "mqtt://me:secret@hub.lan", "mqtts://h?ca=/etc/x"):
        assert announcement(broker) is None
    assert announcement("mqtt://hub.lan", "No Name") is None
    assert discovery.read_announcement(SITES, [], 0, {b"broker": None, b"site": b"\xff"}) is None
    assert discovery.read_announcement(BROKERS, ["fd00::7", "192.168.1.7"], 1883, {}) == Found(
        "mqtt://192.168.1.7:1883"
    )
    assert discovery.read_announcement(BROKERS, ["fe80::7%2"], 1883, {}) is None, "a link-local address"
    assert discovery.read_announcement(BROKERS, ["192.168.1.7"], 0, {}) is None


@pytest.mark.parametrize(
    ("entries", "reaches"),
    [
        (["eth0/device"], True),
        (["br0/brif/eth0/device"], True),
        (["vlan3/lower_eth0/device"], True),
        (["docker0/brif/veth1/brport"], False),
        (["wg0/queues"], False),
        ([], False),
    ],
)
def test_only_interfaces_over_hardware_reach_devices(tmp_path, entries, reaches):
    for entry in entries:
        (tmp_path / entry).mkdir(parents=True)
    assert any(discovery.reaches_devices(each) for each in tmp_path.iterdir()) is reaches


def test_a_site_is_discovered_also_after_its_address_has_changed(monkeypatch):
    pytest.importorskip("zeroconf")
    networks = [set()]
    monkeypatch.setattr(discovery, "own_addresses", lambda: networks[-1])
    monkeypatch.setattr(discovery, "FOLLOW_S", 0.01)
    with announced("planner", "garden", BrokerUrl.parse("mqtts://planner:secret@hub.lan:8883")) as works:
        assert not works, "there is no network yet"
        networks.append({LOOPBACK})
        brokers = []
        for _ in range(10):  # a question or its answer may get lost
            brokers = brokers or discovery.look(1.0, LOOPBACK)
    if not brokers:
        pytest.skip("loopback carries no multicast here")
    assert brokers == [Found("mqtts://hub.lan:8883", "garden")], "without the password"


def test_a_broker_is_announced_with_the_address_of_its_listener(monkeypatch):
    services = []

    @contextlib.contextmanager
    def registers(*service):
        services.append(service)
        yield True

    monkeypatch.setattr("hepti_mqtt.client.discovery.registered", registers)
    for address in ("0.0.0.0", "192.0.2.7", "127.0.0.1"):
        with discovery.announced_broker(address, 1883):
            pass
    with announced("planner", "home", BrokerUrl.parse("mqtt://127.0.0.1:1883")) as works:
        assert not works
    assert services == [(BROKERS, "Hepti broker", 1883, {}, at) for at in (None, ("192.0.2.7",))]


def test_speech_is_announced_for_home_assistant():
    zeroconf = pytest.importorskip("zeroconf")
    with discovery.registered(SPEECH, "Hepti garden speech", 10300, {}, LOOPBACK) as works:
        if not works:
            pytest.skip("loopback carries no multicast here")
        with zeroconf.Zeroconf(interfaces=list(LOOPBACK)) as network:
            name = f"Hepti garden speech on {socket.gethostname()}"[:63] + f".{SPEECH}"
            infos = (network.get_service_info(SPEECH, name, 3000) for _ in range(5))
            info = next(filter(None, infos), None)
    assert info is not None
    assert info.port == 10300


def test_an_agent_without_a_broker_takes_the_discovered_one(monkeypatch, capsys):
    monkeypatch.delenv("HEPTI_BROKER", raising=False)
    monkeypatch.delenv("HEPTI_SITE", raising=False)
    started = []
    monkeypatch.setattr("device_agent.run_agent", started.append)
    monkeypatch.setattr(discovery, "look", lambda: [ATTIC])
    assert main(["agent", "--id", "pi-1"]) == 0
    assert (started[0].url.host, started[0].site) == ("b", "attic")
    assert "mqtts://b:8883" in capsys.readouterr().err
    monkeypatch.setattr(discovery, "look", lambda: [HOME, ATTIC])
    assert main(["agent", "--id", "pi-1"]) == 2
    assert main(["agent", "--id", "pi-1", "--site", "home"]) == 0
    assert started[1].site == "home"


def test_the_error_without_the_extra_names_it(monkeypatch, capsys):
    monkeypatch.delenv("HEPTI_BROKER", raising=False)
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    assert main(["agent"]) == 2
    assert "discovery" in capsys.readouterr().err
