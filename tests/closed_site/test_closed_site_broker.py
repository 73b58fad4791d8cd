"""The files that `hepti site` writes, in a real Mosquitto."""

from __future__ import annotations

import datetime
import signal
from dataclasses import replace

import psutil
import pytest
from closed_broker import Someone, closed_broker

from hepti_mqtt.closed_site.folder import SiteFolder
from hepti_mqtt.errors import NetworkError, RefusedError
from hepti_mqtt.transport import BrokerUrl, Disconnected

pytestmark = pytest.mark.broker
NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def closed(tmp_path):
    with closed_broker(tmp_path / "site", {"pi-1": "device"}) as found:
        yield found


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
    site, broker = closed
    login = replace(BrokerUrl.parse(str(site.login("pi-1"))), ca=str(site.path / "ca.crt"))
    someone = Someone(login)
    site.add("client", "alice").revoke("pi-1")
    for child in psutil.Process(broker._process.pid).children():
        child.send_signal(signal.SIGHUP)
    # Mosquitto throws off who may not be there any more.
    assert isinstance(someone.state_of(Disconnected), Disconnected)
    someone.close()
    Someone(BrokerUrl.parse(str(site.login("alice")))).close()
    with pytest.raises(RefusedError):
        Someone(login)
