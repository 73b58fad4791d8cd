"""A closed site's files in a real Mosquitto: every role and topic, and nobody else."""

from __future__ import annotations

import contextlib
import datetime
import signal
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from broker_kinds import process_of
from closed_broker import closed_broker
from site_processes import PATIENCE_S, Voice

from hepti_mqtt.closed_site.folder import SiteFolder
from hepti_mqtt.closed_site.roles import ROLES, acl_text
from hepti_mqtt.core.errors import CertificateDateError, NetworkError, RefusedError
from hepti_mqtt.core.ids import ALL_DEVICES, PLANNER
from hepti_mqtt.protocol.topics import Kind, Topics
from hepti_mqtt.transport.base import Disconnected, Will
from hepti_mqtt.transport.name_claim import claim
from hepti_mqtt.transport.url import BrokerUrl

NOW = datetime.datetime.now(datetime.UTC)


USERS = {"pi-1": "device", "pi-2": "device", "alice": "client", "bob": "client", "hall": "viewer", "ha": "home"}


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    with closed_broker(tmp_path_factory.mktemp("closed") / "site", {**USERS, "former": "device"}) as closed_site:
        yield closed_site


def url_of(site, user):
    return BrokerUrl.parse(str(site.login(user)))


@pytest.mark.parametrize(("days", "word"), [(3, "valid from"), (-4000, "renew")])
def test_a_certificate_of_another_time_is_one_error_with_both_clocks(tmp_path, days, word):
    """As a machine sees it whose clock is behind, or ahead."""
    issued = NOW + datetime.timedelta(days=days)
    with (
        closed_broker(tmp_path / "site", {"pi-1": "device"}, now=issued) as (site, _),
        pytest.raises(CertificateDateError) as caught,
    ):
        claim(url_of(site, "pi-1"), "hepti/v1/home/dev/pi-1/status", "pi-1", 7)
    assert all(part in str(caught.value) for part in (word, f"clock says {NOW:%Y-}", f"{issued:%Y-}"))


def test_logins_come_in_and_nobody_else(closed, tmp_path):
    site, broker = closed
    assert broker.url == f"mqtts://127.0.0.1:{site.port}"
    url = url_of(site, "pi-1")
    Voice(url).close()
    other = SiteFolder.create(tmp_path / "other", "home", ("127.0.0.1",), 8883, NOW)
    for wrong, error in (
        (replace(url, user=None, password=None), RefusedError),
        (replace(url, password="guess"), RefusedError),
        (replace(url, user="pi-3"), RefusedError),
        (replace(url, ca=str(other.path / "ca.crt")), NetworkError),
        (BrokerUrl(url.host, url.port, user="pi-1", password=url.password), NetworkError),
    ):
        with pytest.raises(error):
            Voice(wrong)


def test_users_change_while_the_broker_runs(closed):
    site, broker = closed
    login = replace(url_of(site, "former"), ca=str(site.path / "ca.crt"))
    with Voice(login) as someone:
        site.add("client", "carol").revoke("former")
        process_of(broker).send_signal(signal.SIGHUP)  # it reads passwords and access list again
        someone.state_of(Disconnected)  # Mosquitto throws off who may not be there any more
    Voice(url_of(site, "carol")).close()
    with pytest.raises(RefusedError):
        Voice(login)


def test_nobody_throws_another_off_with_its_client_id(closed):
    site, _ = closed
    name = "hepti-home-pi-1-control"
    victim = Voice(url_of(site, "pi-1"), client_id=name)
    for raw in (False, True):  # with our own transport, and with a client that takes any id that it likes
        intruder = Voice(url_of(site, "pi-2"), client_id=name, raw=raw)
        victim.read(f"hepti/v1/home/dev/pi-1/{'probe' if raw else 'cmd'}")
        intruder.close()
    assert victim.transport.counts().reconnections == 0
    assert victim.states.empty()
    # A second start of the same user still takes over: that is how two agents of one name notice each other.
    again = Voice(url_of(site, "pi-1"), client_id=name)
    victim.state_of(Disconnected)
    victim.close()
    again.close()


def test_nobody_leaves_a_will_for_another(closed):
    site, _ = closed
    with Voice(url_of(site, "pi-1"), "hepti/v1/home/dev/+/status", "hepti/v1/home/dev/pi-1/probe") as watcher:
        for name in ("pi-1", "pi-2"):
            will = Will(f"hepti/v1/home/dev/{name}/status", name.encode(), 1, retain=False)
            try:
                first = Voice(url_of(site, "pi-2"), client_id="same", will=will)
            except RefusedError:
                assert name == "pi-1"
                continue
            Voice(url_of(site, "pi-2"), client_id="same").close()  # the broker cuts the first off, and has its will
            first.close()
        assert watcher.next() == ("hepti/v1/home/dev/pi-2/status", b"pi-2")


BROKER = Path(__file__).parents[3] / "broker"
EVERYBODY = {PLANNER, *USERS}
DEVICES = {"pi-1", "pi-2"}
ANYTHING = "hepti/v1/home/anything"
HOME, OTHER = Topics("home"), Topics("attic")


# topic -> (who may publish it, who may read it), for the names of one device and one client and for all.
ACCESS = {
    HOME.status("pi-1"): ({"pi-1", PLANNER}, EVERYBODY),
    HOME.caps("pi-1"): ({"pi-1", PLANNER}, EVERYBODY),
    HOME.use("pi-1"): ({"ha", PLANNER}, {PLANNER}),
    HOME.heartbeat("pi-1"): ({"pi-1"}, EVERYBODY),
    HOME.command("pi-1"): ({PLANNER}, {"pi-1"}),
    HOME.reports("pi-1"): ({"pi-1"}, {PLANNER}),
    HOME.probe("pi-1"): ({"pi-1"}, {"pi-1"}),
    HOME.probe("alice"): ({"alice"}, {"alice"}),
    HOME.probe("hall"): ({"hall"}, {"hall"}),
    HOME.probe("doctor"): ({PLANNER}, {PLANNER}),
    HOME.planner_status(): ({PLANNER}, EVERYBODY),
    HOME.plan("m"): ({PLANNER}, EVERYBODY),
    HOME.work("m", "pi-1"): ({PLANNER}, DEVICES),
    HOME.weights("pi-1"): ({PLANNER}, {"pi-1"}),
    HOME.activation("m", 3, "pi-1", "pi-2"): ({"pi-1", PLANNER}, {"pi-2", PLANNER}),
    HOME.activation("m", 3, "pi-1", ALL_DEVICES): ({"pi-1", PLANNER}, {*DEVICES, PLANNER}),
    HOME.activation("m", 3, "pi-1", PLANNER): ({"pi-1", PLANNER}, {PLANNER}),
    HOME.request("m", "alice"): ({"alice", PLANNER}, {PLANNER}),
    HOME.text("m", "ha"): ({"ha", PLANNER}, {PLANNER}),
    HOME.text("m", "alice"): ({"alice", PLANNER}, {PLANNER}),
    HOME.text_response("m", "alice"): ({PLANNER}, {"alice"}),
    HOME.response("m", "alice", "r1"): ({PLANNER}, {"alice"}),
    HOME.response("m", "alice", "r1") + "/part": ({PLANNER}, {"alice"}),
    HOME.event("joined"): ({PLANNER}, EVERYBODY),
    # Clients and viewers are no devices, devices and viewers no clients, whatever their names are.
    HOME.status("alice"): ({PLANNER}, EVERYBODY),
    HOME.activation("m", 3, "alice", ALL_DEVICES): ({PLANNER}, {*DEVICES, PLANNER}),
    HOME.request("m", "pi-1"): ({PLANNER}, {PLANNER}),
    HOME.request("m", "hall"): ({PLANNER}, {PLANNER}),
    HOME.text("m", "hall"): ({PLANNER}, {PLANNER}),
    HOME.home("device", "pi-1"): ({PLANNER}, EVERYBODY),
    "homeassistant/status": ({"ha"}, {"ha", PLANNER}),
    "homeassistant/device/x/config": ({PLANNER}, {"ha", PLANNER}),
    # Other sites, and what is no topic of ours.
    OTHER.status("pi-1"): (set(), set()),
    OTHER.planner_status(): (set(), set()),
    ANYTHING: (set(), set()),
    "anything": (set(), set()),
}


def test_every_kind_of_topic_is_in_the_table():
    ours = [topic for topic in ACCESS if topic.startswith("hepti/v1/home/") and topic.count("/") < 8]
    read_by_none = (ANYTHING, HOME.home("device", "pi-1"))
    assert {HOME.parse(topic).kind for topic in ours if topic not in read_by_none} == set(get_args(Kind))


@pytest.mark.parametrize("protocol", [4, 5], ids=["3.1.1", "5"])
def test_the_access_list_lets_through_what_it_should_and_nothing_else(closed, protocol):
    expected, got, urls = {}, {}, {user: url_of(closed[0], user) for user in EVERYBODY}
    with contextlib.ExitStack() as stack:
        readers = {user: stack.enter_context(Voice(url, "#", protocol=protocol)) for user, url in urls.items()}
        for user, url in urls.items():
            writer = Voice(url, protocol=protocol)
            for topic, (writers, allowed) in ACCESS.items():
                writer.say(topic, user.encode())
                expected[user, topic] = allowed if user in writers else set()
            writer.close(PATIENCE_S)  # returns when the broker has acknowledged everything
        end = stack.enter_context(Voice(urls[PLANNER], protocol=protocol))
        end.say(HOME.event("end"), b"")  # behind all others: a broker keeps the order of what it sends
        for name, reader in readers.items():
            while (heard := reader.next())[0] != HOME.event("end"):
                got.setdefault((heard[1].decode(), heard[0]), set()).add(name)
    assert got == {key: allowed for key, allowed in expected.items() if allowed}


def test_the_example_has_every_role():
    text = (BROKER / "acl.example").read_text()
    users = {"planner": "planner", "pi-1": "device", "alice": "client", "hall-tablet": "viewer", "ha": "home"}
    assert set(users.values()) == set(ROLES)
    assert text == acl_text("+", users)
