"""Every role and every topic: what is let through, and what is not, by a real Mosquitto with the generated list."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from closed_broker import PATIENCE_S, Someone, closed_broker

from hepti_mqtt.closed_site.folder import ROLES, access_list
from hepti_mqtt.ids import ALL, PLANNER
from hepti_mqtt.protocol.topics import Kind, Topics
from hepti_mqtt.transport import BrokerUrl

BROKER = Path(__file__).parents[2] / "broker"
USERS = {"pi-1": "device", "pi-2": "device", "alice": "client", "bob": "client", "hall": "viewer"}
EVERYBODY = {PLANNER, *USERS}
DEVICES = {"pi-1", "pi-2"}
ANYTHING = "hepti/v1/home/anything"
T, OTHER = Topics("home"), Topics("attic")

# topic -> (who may publish it, who may read it), for the names of one device and one client and for all.
ACCESS = {
    T.status("pi-1"): ({"pi-1"}, EVERYBODY),
    T.caps("pi-1"): ({"pi-1"}, EVERYBODY),
    T.heartbeat("pi-1"): ({"pi-1"}, EVERYBODY),
    T.command("pi-1"): ({PLANNER}, {"pi-1"}),
    T.up("pi-1"): ({"pi-1"}, {PLANNER}),
    T.probe("pi-1"): ({"pi-1"}, {"pi-1"}),
    T.probe("alice"): ({"alice"}, {"alice"}),
    T.probe("hall"): ({"hall"}, {"hall"}),
    T.probe("doctor"): ({PLANNER}, {PLANNER}),
    T.planner_status(): ({PLANNER}, EVERYBODY),
    T.plan("m"): ({PLANNER}, EVERYBODY),
    T.work("m", "pi-1"): ({PLANNER}, DEVICES),
    T.weights("pi-1"): ({PLANNER}, {"pi-1"}),
    T.weights(ALL): ({PLANNER}, DEVICES),
    T.activation("m", 3, "pi-1", "pi-2"): ({"pi-1"}, {"pi-2"}),
    T.activation("m", 3, "pi-1", ALL): ({"pi-1"}, DEVICES),
    T.activation("m", 3, "pi-1", PLANNER): ({"pi-1"}, set()),
    T.request("m", "alice"): ({"alice"}, {PLANNER}),
    T.response("m", "alice", "r1"): ({PLANNER}, {"alice"}),
    T.response("m", "alice", "r1") + "/part": ({PLANNER}, {"alice"}),
    T.event("joined"): ({PLANNER, *DEVICES}, EVERYBODY),
    # Clients and viewers are no devices, devices and viewers no clients, whatever their names are.
    T.status("alice"): (set(), EVERYBODY),
    T.activation("m", 3, "alice", ALL): (set(), DEVICES),
    T.request("m", "pi-1"): (set(), {PLANNER}),
    T.request("m", "hall"): (set(), {PLANNER}),
    # Other sites, and what is no topic of ours.
    OTHER.status("pi-1"): (set(), set()),
    OTHER.planner_status(): (set(), set()),
    ANYTHING: (set(), set()),
    "anything": (set(), set()),
}


def test_every_kind_of_topic_is_in_the_table():
    ours = [topic for topic in ACCESS if topic.startswith("hepti/v1/home/") and topic.count("/") < 8]
    assert {T.parse(topic).kind for topic in ours if topic != ANYTHING} == set(get_args(Kind))


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    with closed_broker(tmp_path_factory.mktemp("roles") / "site", USERS) as (site, _):
        yield {user: BrokerUrl.parse(str(site.login(user))) for user in EVERYBODY}


@pytest.mark.broker
@pytest.mark.parametrize("protocol", [4, 5], ids=["3.1.1", "5"])
def test_the_access_list_lets_through_what_it_should_and_nothing_else(urls, protocol):
    readers = {user: Someone(url, protocol=protocol) for user, url in urls.items()}
    expected, got = {}, {}
    try:
        for reader in readers.values():
            reader.read("#")
        for user, url in urls.items():
            writer = Someone(url, protocol=protocol)
            for topic, (writers, allowed) in ACCESS.items():
                writer.transport.publish(topic, user.encode(), 1)
                expected[user, topic] = allowed if user in writers else set()
            writer.transport.close(timeout_s=PATIENCE_S)  # returns when the broker has acknowledged everything
        end = Someone(urls[PLANNER], protocol=protocol)
        end.transport.publish(T.event("end"), b"", 1)  # behind all others: a broker keeps the order of what it sends
        for name, reader in readers.items():
            while (heard := reader.heard.get(timeout=PATIENCE_S))[0] != T.event("end"):
                topic, user = heard[0], heard[1].decode()
                got.setdefault((user, topic), set()).add(name)
        end.close()
    finally:
        for reader in readers.values():
            reader.close()
    assert got == {key: allowed for key, allowed in expected.items() if allowed}


def test_the_example_has_every_role():
    text = (BROKER / "acl.example").read_text()
    users = {"planner": "planner", "pi-1": "device", "alice": "client", "hall-tablet": "viewer"}
    assert set(users.values()) == set(ROLES)
    assert text == access_list("+", users)
