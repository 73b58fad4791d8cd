"""A closed site's broker for tests: what `hepti site` writes, at work in a real Mosquitto."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker_kinds import mosquitto_or_skip
from site_processes import Site, free_port

from hepti_mqtt.closed_site.folder import SiteFolder
from hepti_mqtt.closed_site.roles import Role
from hepti_mqtt.embedded_broker import EmbeddedBroker, start_broker


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
    port = free_port(host)
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

    def start(self, name: str, *arguments: str, **how: Any) -> subprocess.Popen[bytes]:
        self.url = str(self.folder.login(name))
        return super().start(name, *arguments, **how)
