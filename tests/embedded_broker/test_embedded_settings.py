"""Settings, passwords and the access list of broker/, with a real Mosquitto."""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.embedded_broker.process import EmbeddedBroker
from hepti_mqtt.embedded_broker.settings import SETTINGS, configuration, password_lines
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import ALL
from hepti_mqtt.transport import BrokerUrl, PahoTransport, Subscribed
from hepti_mqtt.wire.topics import Topics

PATIENCE_S = 20.0
BROKER = Path(__file__).parents[2] / "broker"
USERS = ("planner", "pi-1", "pi-2", "alice", "bob")
T = Topics("home")


def lines(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_file_and_the_embedded_broker_agree():
    text = (BROKER / "mosquitto.conf").read_text()
    settings = [f"{s.name} {s.value}" for s in SETTINGS]
    assert lines(text)[-len(settings) :] == settings
    assert (
        lines(configuration("127.0.0.1", 1, user="me", password_file=None, max_packet_bytes=None))[-len(settings) :]
        == settings
    )
    for setting in SETTINGS:
        assert f"# {setting.why[0].upper()}{setting.why[1:]}.\n{setting.name} {setting.value}\n" in text


def test_a_limit_replaces_the_packet_size():
    text = configuration("127.0.0.1", 1, user="me", password_file="p", max_packet_bytes=1234)
    assert "max_packet_size 1234" in lines(text)
    assert "allow_anonymous false" in lines(text)
    assert "allow_anonymous true" not in text


@pytest.mark.parametrize("user", ["", "a:b", "a\nb"])
def test_a_user_name_that_would_break_the_file_is_refused(user):
    with pytest.raises(ConfigError, match="password file"):
        password_lines({user: "x"})


def test_passwords_are_salted_and_not_in_the_file():
    text = password_lines({"a": "s3cret", "b": "s3cret"})
    assert "s3cret" not in text
    first, second = text.splitlines()
    assert re.fullmatch(r"a:\$7\$20000\$[A-Za-z0-9+/=]{16}\$[A-Za-z0-9+/=]{88}", first)
    assert first.split("$")[3:] != second.split("$")[3:]


class User:
    """A user of the broker and what it has read."""

    def __init__(self, port, name):
        self.heard, states = queue.SimpleQueue(), queue.SimpleQueue()
        self.transport = PahoTransport(
            BrokerUrl("127.0.0.1", port, user=name, password=f"of {name}"),
            f"{name}-{uuid.uuid4().hex[:8]}",
            on_message=lambda topic, payload: self.heard.put((topic, payload)),
            on_state=states.put,
            protocol=4,
        )
        self.transport.connect(PATIENCE_S)
        self.transport.subscribe([("hepti/#", 1)])
        while not isinstance(states.get(timeout=PATIENCE_S), Subscribed):
            continue


@pytest.fixture(scope="module")
def site():
    """The files of broker/ at work: Mosquitto with its own configuration, access list and users."""
    with start_broker(users={name: f"of {name}" for name in USERS}) as broker:
        if broker.kind == "amqtt":
            pytest.skip("needs Mosquitto")
        folder = broker._directory
        text = (BROKER / "mosquitto.conf").read_text()
        # Its own port, account and directory; nothing else is changed.
        text = text.replace("/etc/mosquitto", str(folder)).replace("listener 1883", f"listener {broker.port} 127.0.0.1")
        user = re.search(r"^user .*$", (folder / "mosquitto.conf").read_text(), re.MULTILINE)[0]
        shutil.copy(BROKER / "acl.example", folder / "acl")
        with pytest.MonkeyPatch.context() as patch:
            honest = EmbeddedBroker._command

            def command(self, port):
                out = honest(self, port)
                (folder / "mosquitto.conf").write_text(f"{user}\n{text}")
                return out

            patch.setattr(EmbeddedBroker, "_command", command)
            broker.restart()
        users = {name: User(broker.port, name) for name in USERS}
        yield users
        for user in users.values():
            user.transport.close(timeout_s=0.2)


# (who publishes, where) -> who reads it; none where it must not get through.
ACCESS = {
    ("pi-1", T.status("pi-1")): set(USERS),
    ("pi-1", T.caps("pi-1")): set(USERS),
    ("pi-1", T.heartbeat("pi-1")): set(USERS),
    ("pi-1", T.up("pi-1")): {"planner"},
    ("pi-1", T.probe("pi-1")): {"pi-1"},
    ("pi-1", T.activation("m", 3, "pi-1", "pi-2")): {"pi-2"},
    ("pi-1", T.activation("m", 3, "pi-1", ALL)): set(USERS),
    ("pi-1", T.event("joined")): set(USERS),
    ("planner", T.command("pi-1")): {"pi-1"},
    ("planner", T.planner_status()): set(USERS),
    ("planner", T.plan("m")): set(USERS),
    ("planner", T.work("m")): set(USERS),
    ("planner", T.weights("pi-1")): {"pi-1"},
    ("planner", T.weights(ALL)): set(USERS),
    ("planner", T.response("m", "alice", "r1")): {"alice"},
    ("alice", T.request("m", "alice")): {"planner"},
    # Nobody speaks for another.
    ("pi-1", T.status("pi-2")): set(),
    ("pi-1", T.activation("m", 3, "pi-2", "pi-1")): set(),
    ("pi-1", T.command("pi-2")): set(),
    ("pi-1", T.plan("m")): set(),
    ("pi-1", T.work("m")): set(),
    ("pi-1", T.weights(ALL)): set(),
    ("pi-1", T.planner_status()): set(),
    ("bob", T.request("m", "alice")): set(),
    ("bob", T.response("m", "alice", "r1")): set(),
    ("bob", "hepti/v1/home/anything"): set(),
    ("planner", T.status("pi-1")): set(),
    ("planner", T.activation("m", 3, "pi-1", ALL)): set(),
}


@pytest.mark.broker
def test_the_access_list_lets_through_what_it_should_and_nothing_else(site):
    for place, (publisher, topic) in enumerate(ACCESS):
        site[publisher].transport.publish(topic, b"%d" % place, 1)
    for name in USERS:
        # A word that everybody reads, behind the others: the broker keeps the order of one publisher.
        site[name].transport.publish(T.event("end"), b"end", 1)
    keys, got = list(ACCESS), {key: set() for key in ACCESS}
    for name, user in site.items():
        ends = 0
        while ends < len(USERS):
            topic, payload = user.heard.get(timeout=PATIENCE_S)
            ends += payload == b"end"
            if payload != b"end":
                assert keys[int(payload)][1] == topic
                got[keys[int(payload)]].add(name)
    assert got == ACCESS


@pytest.mark.broker
@pytest.mark.skipif(shutil.which("mosquitto_passwd") is None, reason="needs mosquitto_passwd")
def test_a_password_file_of_mosquitto_has_the_same_form(tmp_path):
    path = tmp_path / "passwd"
    subprocess.run(["mosquitto_passwd", "-c", "-b", path, "a", "b"], check=True, capture_output=True)
    theirs, ours = path.read_text().strip().split("$"), password_lines({"a": "b"}).strip().split("$")
    assert theirs[:2] == ours[:2] == ["a:", "7"]
    assert [len(part) for part in theirs[3:]] == [len(part) for part in ours[3:]]
