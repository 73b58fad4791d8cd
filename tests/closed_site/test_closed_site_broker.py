"""The files that `hepti site` writes, in a real Mosquitto."""

from __future__ import annotations

import datetime
import signal
from dataclasses import replace

import psutil
import pytest
from closed_broker import PATIENCE_S, Someone, closed_broker
from site_processes import poll

from hepti_mqtt.closed_site.folder import SiteFolder
from hepti_mqtt.errors import NetworkError, RefusedError
from hepti_mqtt.transport import BrokerUrl, Disconnected, Will

pytestmark = pytest.mark.broker
NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def closed(tmp_path):
    with closed_broker(tmp_path / "site", {"pi-1": "device"}) as found:
        yield found


def url_of(site, user):
    return BrokerUrl.parse(str(site.login(user)))


def reload(closed):
    """Let the broker read passwords and access list again: it has when who was added comes in."""
    site, broker = closed
    for child in psutil.Process(broker._process.pid).children():
        child.send_signal(signal.SIGHUP)
    newest = list(SiteFolder.open(site.path).users)[-1]

    def comes_in():
        try:
            Someone(url_of(site, newest)).close()
        except RefusedError:
            return False
        return True

    poll(comes_in, f"{newest} may come in")


def test_logins_come_in_and_nobody_else(closed, tmp_path):
    site, broker = closed
    assert broker.url == f"mqtts://127.0.0.1:{site.port}"
    url = BrokerUrl.parse(str(site.login("pi-1")))
    Someone(url).close()
    for wrong in (
        BrokerUrl(url.host, url.port, tls=True, ca=url.ca),
        BrokerUrl(url.host, url.port, tls=True, ca=url.ca, user="pi-1", password="guess"),
        BrokerUrl(url.host, url.port, tls=True, ca=url.ca, user="pi-2", password=url.password),
    ):
        with pytest.raises(RefusedError):
            Someone(wrong)
    other = SiteFolder.make(tmp_path / "other", "home", ("127.0.0.1",), 8883, NOW)
    with pytest.raises(NetworkError, match="certificate"):
        Someone(BrokerUrl(url.host, url.port, tls=True, ca=str(other.path / "ca.crt"), user="pi-1", password="x"))
    with pytest.raises(NetworkError):
        Someone(BrokerUrl(url.host, url.port, user="pi-1", password=url.password))


def test_users_change_while_the_broker_runs(closed):
    site, _ = closed
    login = replace(BrokerUrl.parse(str(site.login("pi-1"))), ca=str(site.path / "ca.crt"))
    someone = Someone(login)
    site.add("client", "alice").revoke("pi-1")
    reload(closed)
    # Mosquitto throws off who may not be there any more.
    assert isinstance(someone.state_of(Disconnected), Disconnected)
    someone.close()
    Someone(BrokerUrl.parse(str(site.login("alice")))).close()
    with pytest.raises(RefusedError):
        Someone(login)


def test_nobody_throws_another_off_with_its_client_id(closed):
    site, _ = closed
    site.add("device", "pi-2")
    reload(closed)
    victim = Someone(url_of(site, "pi-1"), "hepti-home-pi-1-control")
    for raw in (False, True):  # with our own transport, and with a client that takes any id that it likes
        intruder = Someone(url_of(site, "pi-2"), "hepti-home-pi-1-control", raw=raw)
        victim.read(f"hepti/v1/home/dev/pi-1/{'probe' if raw else 'cmd'}")
        intruder.close()
    assert victim.transport.counts().reconnections == 0
    assert victim.states.empty()
    # A second start of the same user still takes over: that is how two agents of one name notice each other.
    again = Someone(url_of(site, "pi-1"), "hepti-home-pi-1-control")
    victim.state_of(Disconnected)
    victim.close()
    again.close()


def test_nobody_leaves_a_will_for_another(closed):
    site, _ = closed
    site.add("device", "pi-2")
    reload(closed)
    watcher = Someone(url_of(site, "pi-1"))
    watcher.read("hepti/v1/home/dev/+/status", "hepti/v1/home/dev/pi-1/probe")
    for name in ("pi-1", "pi-2"):
        will = Will(f"hepti/v1/home/dev/{name}/status", name.encode(), 1, retain=False)
        try:
            first = Someone(url_of(site, "pi-2"), "same", will=will)
        except RefusedError:
            assert name == "pi-1"
            continue
        Someone(url_of(site, "pi-2"), "same").close()  # the broker cuts the first one off, and publishes its will
        first.close()
    topic, payload = watcher.heard.get(timeout=PATIENCE_S)
    assert (topic, payload) == ("hepti/v1/home/dev/pi-2/status", b"pi-2")
    watcher.close()
