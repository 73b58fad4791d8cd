"""This device's own endpoint as the agent opens it: where its options and the broker's URL say, or not at all."""

from __future__ import annotations

from collections.abc import Callable

from device_agent.complaints import Complaints
from device_agent.config import AgentConfig
from device_agent.endpoint import listening_address, own_address, own_certificate
from device_agent.heartbeat import PeerWatch
from device_agent.mesh_links import MeshLinks
from device_agent.peer_probes import PeerProbes
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.transport.mesh import Mesh, MeshEvent, MeshTls, mesh_possible
from hepti_mqtt.wire.peers import Endpoint
from hepti_mqtt.wire.topics import Topics


class OwnEndpoint:
    """The endpoint of an agent. links: None where all exchanges are left to the broker.

    Raises ConfigError for a port that cannot be had, and for a certificate that is none.
    """

    def __init__(self, config: AgentConfig, topics: Topics, boot: int, complaints: Complaints) -> None:
        self._config, self._fingerprint = config, ""
        self.links: MeshLinks | None = None
        if (address := self._address()) is None or not config.mesh or not mesh_possible():
            return
        certificate = config.mesh_tls or own_certificate(config.url)
        if config.url.tls and certificate is None:
            config.log.info("exchanges go over the broker, which is encrypted; --mesh-tls lets peers connect as well")
            return
        tls = None if certificate is None else MeshTls.load(certificate, certificate)

        def make(on_message: Callable[[str, str, memoryview], None], on_event: Callable[[MeshEvent], None]) -> Mesh:
            host, user = listening_address(address), config.device_id
            return Mesh(host, config.mesh_port, user=user, on_message=on_message, on_event=on_event, tls=tls)

        try:
            self.links = MeshLinks(topics, config.device_id, make, complaints, PeerProbes(config.device_id, boot))
        except OSError as exc:
            if config.mesh_port:
                raise ConfigError(f"--mesh-port {config.mesh_port} cannot be had: {exc}; choose another one") from exc
            complaints.add("mesh_closed", f"no endpoint for peers at {address}: {exc}")
        self._fingerprint = "" if tls is None else tls.fingerprint

    def told(self) -> Endpoint | None:
        """Return where peers are told to come; the address may change with the way to the broker."""
        address = self._address()
        if self.links is None or address is None:
            return None
        return Endpoint(address, self.links.mesh.port, self._fingerprint)

    def watch(self, due: Callable[[], None]) -> PeerWatch | None:
        """Return what heartbeats say of peers; due: lets the session thread probe one."""
        links = self.links
        return None if links is None else PeerWatch(links.probes.reports, links.edges, lambda: links.tensors, due)

    def close(self) -> None:
        """Close it."""
        if self.links is not None:
            self.links.close()

    def _address(self) -> str | None:
        return self._config.mesh_host or own_address(self._config.url)
