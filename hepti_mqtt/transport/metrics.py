"""Prometheus metrics of devices, from their heartbeats, and their HTTP server; needs the extra `metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import NetworkError
from hepti_mqtt.protocol.messages import Heartbeat

_PLANES: Final = ("control", "data")
_PACKETS: Final = {"published": "out", "received": "in"}
_SECONDS: Final = {"compute_us": "compute", "wait_us": "wait"}
_TILES: Final = "tile_bytes_received"


class Collected(Collector):
    """Metrics that `collect` computes for each request."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics."""
        return self._collect()


class MetricsServer:
    """Serves `/metrics` on its own threads until `close`.

    namespace: prefix of the process's own metrics. Raises NetworkError if the address is in use.
    """

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry, namespace: str) -> None:
        ProcessCollector(namespace=namespace, registry=registry)
        build = GaugeMetricFamily(f"{namespace}_info", "Version of this process, always 1", labels=("version",))
        build.add_metric((__version__,), 1)
        registry.register(Collected(lambda: [build]))
        host, port = address
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            why = error.strerror or error
            raise NetworkError(f"cannot serve metrics on {host} port {port}: {why}; choose another --metrics") from None
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_device(address: tuple[str, int], device: str, last: Callable[[], Heartbeat | None]) -> MetricsServer:
    """Serve an agent's metrics; last: returns its last heartbeat, None before the first. Raises NetworkError."""

    def collect() -> Iterator[Metric]:
        heartbeat = last()
        return device_metrics({} if heartbeat is None else {device: heartbeat})

    registry = CollectorRegistry()
    registry.register(Collected(collect))
    return MetricsServer(address, registry, "hepti_agent")


def device_metrics(heartbeats: Mapping[str, Heartbeat]) -> Iterator[Metric]:
    """Yield the metrics of devices; agents and the planner use it."""
    yield from _gauges(heartbeats)
    packets = _counter("mqtt_packets", "PUBLISH packets to and from the broker", "plane", "direction")
    nbytes = _counter("mqtt_bytes", "Bytes of PUBLISH packets to and from the broker", "plane", "direction")
    seconds = {name: _counter(f"{name}_seconds", f"Time of runs spent in {name}") for name in _SECONDS.values()}
    weights = _counter("weights_bytes", "Bytes of weights that arrived")
    events = _counter("events", "Drops, repetitions, errors and what else is counted", "event")
    for device, heartbeat in heartbeats.items():
        left = dict(heartbeat.counters)
        for plane in _PLANES:
            for name, direction in _PACKETS.items():
                packets.add_metric((device, plane, direction), left.pop(f"{plane}_{name}", 0))
                nbytes.add_metric((device, plane, direction), left.pop(f"{plane}_{name}_bytes", 0))
        for name, metric in _SECONDS.items():
            seconds[metric].add_metric((device,), left.pop(name, 0) / 1e6)
        weights.add_metric((device,), left.pop(_TILES, 0))
        for name, count in left.items():
            events.add_metric((device, name), count)
    yield from (packets, nbytes, *seconds.values(), weights, events)
    yield from _edges(heartbeats)


def _gauges(heartbeats: Mapping[str, Heartbeat]) -> Iterator[Metric]:
    values: tuple[tuple[str, str, Callable[[Heartbeat], float | None]], ...] = (
        ("other_cpu_ratio", "Part of all cores that other programs use", lambda h: h.cpu_other),
        ("free_memory_bytes", "Memory that is free", lambda h: h.free_bytes),
        ("resident_memory_bytes", "Resident memory of the agent", lambda h: h.rss_bytes),
        ("temperature_celsius", "Temperature of the processor", lambda h: h.temperature_c),
        ("slowdown_ratio", "Observed over measured time of kernels", lambda h: h.slowdown),
        ("round_trip_seconds", "To the broker and back", lambda h: h.round_trip_s),
        ("link_bytes_per_second", "Measured rate to the broker", lambda h: h.bandwidth_bytes_per_s),
    )
    for name, about, value in values:
        metric = GaugeMetricFamily(f"hepti_device_{name}", about, labels=("device",))
        for device, heartbeat in heartbeats.items():
            if (number := value(heartbeat)) is not None:
                metric.add_metric((device,), number)
        yield metric


def _edges(heartbeats: Mapping[str, Heartbeat]) -> Iterator[Metric]:
    nbytes = _counter("edge_bytes", "Bytes of tensors received directly from a peer", "source")
    frames = _counter("edge_frames", "Tensors received directly from a peer", "source")
    dropped = _counter("edge_dropped", "Messages to a peer for which there was no room", "to")
    for device, heartbeat in heartbeats.items():
        for peer, edge in heartbeat.edges.items():
            nbytes.add_metric((device, peer), edge.bytes_in)
            frames.add_metric((device, peer), edge.frames_in)
            dropped.add_metric((device, peer), edge.dropped)
    yield from (nbytes, frames, dropped)


def _counter(name: str, about: str, *labels: str) -> Any:
    return CounterMetricFamily(f"hepti_device_{name}", about, labels=("device", *labels))
