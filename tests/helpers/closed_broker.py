"""A closed site's broker for tests: what `hepti site` writes, at work in a real Mosquitto."""

from __future__ import annotations

import datetime
import queue
import socket
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker_kinds import mosquitto_or_skip
from site_processes import Site

from hepti_mqtt.closed_site.folder import SiteFolder
from hepti_mqtt.closed_site.roles import Role
from hepti_mqtt.embedded_broker import EmbeddedBroker, start_broker
from hepti_mqtt.transport.base import Connected, State, Subscribed
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

PATIENCE_S = 20.0


@contextmanager
def closed_broker(
    path: Path,
    users: Mapping[str, Role],
    site: str = "home",
    host: str = "127.0.0.1",
    now: datetime.datetime | None = None,
) -> Iterator[tuple[SiteFolder, EmbeddedBroker]]:
    """Yield a closed site with its users, and its broker, which runs with the site's files; now: when it is made."""
    mosquitto_or_skip()
    with socket.socket() as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
    folder = SiteFolder.create(path, site, (host, "localhost"), port, now or datetime.datetime.now(datetime.UTC))
    for user, role in users.items():
        folder = folder.add(role, user)
    with start_broker("mosquitto", closed=folder.broker, address=host, port=port) as broker:
        assert broker.kind == "mosquitto", broker.reason
        yield folder, broker


class ClosedSite(Site):
    """Processes that each come in with the login of their own name."""

    def __init__(self, directory: Path, broker: EmbeddedBroker, models: Mapping[str, Path], folder: SiteFolder) -> None:
        super().__init__(directory, broker, models)
        self.folder = folder

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        self.url = str(self.folder.login(name))
        return super().start(name, *arguments)


class Someone:
    """A connection with what it has heard; raises what the broker says to its login. raw: the client id as it is."""

    def __init__(self, url: BrokerUrl, client_id: str = "", raw: bool = False, **options: Any) -> None:
        self.heard: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self.states: queue.SimpleQueue[State] = queue.SimpleQueue()
        self.transport = BrokerConnection(
            url,
            client_id or f"test-{uuid.uuid4().hex[:12]}",
            on_message=lambda topic, payload: self.heard.put((topic, payload)),
            on_state=self.states.put,
            **options,
        )
        if raw:
            self.transport.client_id = client_id
        try:
            self.transport.connect(PATIENCE_S)
            self.state_of(Connected)
        except BaseException:
            self.transport.close(timeout_s=0.2)
            raise

    def state_of(self, kind: type[Any]) -> State:
        """Return the next state of a kind."""
        while not isinstance(state := self.states.get(timeout=PATIENCE_S), kind):
            continue
        return state

    def read(self, *filters: str) -> None:
        """Subscribe, and return when that is acknowledged."""
        self.transport.subscribe([(name, 1) for name in filters])
        self.state_of(Subscribed)

    def close(self) -> None:
        """Leave."""
        self.transport.close(timeout_s=0.2)
