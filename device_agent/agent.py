"""One device's process: its directories, the lock that keeps a second agent out, and its parts, wired."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import platformdirs
import psutil

from device_agent.background import BackgroundTuning, StartupStatus, prepare_kernels
from device_agent.budget import Budget
from device_agent.config import AgentConfig, mesh_address
from device_agent.heartbeat import HeartbeatThread, Meter
from device_agent.links import MeshLinks, open_links
from device_agent.loader import LoaderThread, LoadEvent, WeightLoader
from device_agent.machine import HealthMonitor, free_memory, has_cpu_quota, memory_budget, usable_cores
from device_agent.measure import Curves, load_or_measure, measurement_file
from device_agent.network import PLANES, AgentEvent, Network, Stop
from device_agent.probes import Prober
from device_agent.saved_caches import SHARE, SavedCaches
from device_agent.shell import BuilderThread, SessionLoop
from device_agent.tile_cache import TileCache
from device_agent.tile_peers import MessageKind, TilePeers
from hepti_mqtt import __version__
from hepti_mqtt.config.process import RateLimitedLog, StopRequested, StopSignals, requires_extra, return_large_blocks
from hepti_mqtt.core.errors import ConfigError, NetworkError
from hepti_mqtt.core.ids import Start, check_name
from hepti_mqtt.kernels import Workers, isa, jit
from hepti_mqtt.kernels.compile_cache import compile_lock
from hepti_mqtt.kernels.cpu import require_known
from hepti_mqtt.kernels.jit import release_compiler
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.keys import KEY_BYTES, public_key
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Plane
from hepti_mqtt.runtime.worker.interface import CachesRead, ReadCaches
from hepti_mqtt.runtime.worker.session import WorkerSession
from hepti_mqtt.transport.base import Backoff, Connected, Inbox, OnMessage, OnState, Will
from hepti_mqtt.transport.broker_connection import BrokerConnection, DataConnection
from hepti_mqtt.transport.broker_limits import PacketLimit, open_broker_warning
from hepti_mqtt.transport.name_claim import claim, new_boot

if TYPE_CHECKING:
    from hepti_mqtt.transport.metrics import MetricsServer

APP: Final = "hepti"


class AgentDirectories(NamedTuple):
    """Where one device keeps its state (lock, measurement), its weight tiles and its KV caches."""

    state: Path
    tiles: Path
    caches: Path


def agent_directories(root: Path | None, site: str, device: str) -> AgentDirectories:
    """Return the directories of one device: below `root`, or in the user's own places.

    The state's directory is created, in a temporary place if its own cannot be written. Raises BadNameError for names
    that are invalid in topics, ConfigError if no place can be written.
    """
    state = root if root is not None else platformdirs.user_state_path(APP) / "agents"
    cache = root if root is not None else platformdirs.user_cache_path(APP) / "agents"
    own = Path(check_name("site", site)) / check_name("device", device)
    cached = cache / own / "tiles", cache / own / "kv"  # created by their writers; an agent also works without
    try:
        return AgentDirectories(_writable(state / own), *cached)
    except OSError as exc:
        try:  # a worn SD card is read-only; /tmp may be memory
            return AgentDirectories(_writable(_private_temporary() / own), *cached)
        except OSError:
            raise ConfigError(
                f"cannot write the agent's directory {state / own}: {exc.strerror or exc}; set XDG_STATE_HOME and "
                "XDG_CACHE_HOME, or choose one directory with --cache"
            ) from exc


def _writable(path: Path) -> Path:
    """Create a directory and return it; raises OSError if it cannot be written."""
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it cannot be written", str(path))
    return path


def _private_temporary() -> Path:
    """Return this user's own directory for temporary files; raises OSError if another user owns it."""
    path = Path(tempfile.gettempdir()) / f"{APP}-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.geteuid() or path.is_symlink():
        raise PermissionError(errno.EACCES, "it belongs to somebody else", str(path))
    return path


@contextmanager
def device_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of one device's directory; the kernel releases it when the process ends.

    Raises ConfigError if another agent holds it.
    """
    path = directory / "lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise ConfigError(f"cannot open {path}: {exc}; choose another place with --cache") from exc
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.read(handle, 32).decode("ascii", "replace").strip()
            raise ConfigError(
                f"another agent (process {holder or 'unknown'}) already runs as this device: {path} is locked; "
                "stop it, or start this one with another --id"
            ) from exc
        with suppress(OSError):  # on a full disk the lock still holds; only the holder's PID is missing
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode("ascii"))
        yield
    finally:
        os.close(handle)


# ----------------------------------------------------------------------------------------------------------------------
# The agent: one device's process, from its first connection to its last status.


SWITCH_INTERVAL_S: Final = 0.0005
CONNECT_TIMEOUT_S: Final = 5.0


def run_agent(config: AgentConfig, stop: StopSignals | None = None) -> None:
    """Run a device until a stop is requested; in the main thread SIGTERM and SIGINT request it, too.

    Raises ConfigError (names, options, environment, a second agent of the same name), RefusedError (credentials, access
    list), and without `retry` NetworkError if the broker is absent at the start.
    """
    if config.threads < 1:
        raise ConfigError(f"an agent needs at least one thread, got {config.threads}; choose another --threads")
    require_known()
    return_large_blocks()
    places = agent_directories(config.cache_dir, config.site, config.device_id)
    with device_lock(places.state), stop or StopSignals() as signals:
        agent: _Agent | None = None
        try:
            agent = _Agent(config, places, new_boot())
            agent.run(signals)
        except StopRequested:
            signals.ignore_further()
            config.log.info("stopped before the device was online")
        except Exception as error:
            if agent is not None:
                agent.fault = agent.fault or str(error) or repr(error)
            raise
        finally:
            signals.ignore_further()
            if agent is not None:
                agent.close()


class _Agent:
    """All parts of one agent, wired."""

    def __init__(self, config: AgentConfig, places: AgentDirectories, boot: int) -> None:
        self._config, self._start, self._places = config, Start(0, boot), places
        self._log = config.log
        self._topics = Topics(config.site)
        self._private_key = token_bytes(KEY_BYTES)
        self.inbox: Inbox[AgentEvent] = Inbox()
        self._complaints = RateLimitedLog(self._log)
        self._loader_counters: Counter[str] = Counter()
        self._prober = Prober(config.device_id, boot)
        self._is_announced = False
        self._cache = cache = TileCache(
            places.tiles, config.cache_bytes, self._loader_counters, on_trouble=self._cache_changed
        )
        self._budget = budget = Budget(usable_cores() if has_cpu_quota() else None)
        weights = WeightLoader(
            cache,
            self._loading,
            self._request_tiles,
            self._loader_counters,
            TilePeers(cache, self._send_to_peer, self._loader_counters),
            config.device_id,
            is_busy=lambda: budget.running,
            report=self._report_cached,
        )
        self._saved = SavedCaches(places.caches, config.cache_bytes // SHARE, self._log)
        self._loader = LoaderThread(weights, self._loader_counters, self._log, self._budget, self._read_caches)
        self._network = Network(
            self._topics,
            config.device_id,
            self.inbox,
            self._prober,
            self._loader.post,
            self._complaints,
            self._transport,
        )
        self._workers: Workers | None = None
        self._builder: BuilderThread | None = None
        self._heartbeat: HeartbeatThread | None = None
        self._shell: SessionLoop | None = None
        self._tuning: BackgroundTuning | None = None
        self._links: MeshLinks | None = None
        self._metrics = None if config.metrics is None else self._serve_metrics(config.metrics)
        self._packets = PacketLimit(
            config.url,
            f"hepti-{config.site}-{config.device_id}-size",
            Topics(config.site).probe(config.device_id),
            self._complaints.record,
        )
        self._reached = False  # whether the site knows that the device is starting
        self.fault = ""  # why the agent ends, if it fails

    def run(self, signals: StopSignals) -> None:
        """Connect, measure, and work."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        waiting = self._connect(PLANES)  # first, so that a wrong password is reported immediately
        self._reached = "control" not in waiting
        if not waiting:
            self._warn_if_open()
        with StartupStatus(self._publish_starting, self._start, self._log) as starting:
            workers, curves = self._measure(starting)
        signals.raise_if_requested()
        rss_idle = int(psutil.Process().memory_info().rss)
        budget = memory_budget(self._config.memory_bytes, free_memory())
        self._log.info("idle at %.0f MiB, %.0f MiB for weights", rss_idle / 2**20, budget / 2**20)
        if waiting:
            self._wait_for_broker(waiting, signals)
            self._warn_if_open()
        shell = self._assemble(workers, curves, budget, rss_idle)
        signals.on_stop(lambda: self.inbox.post(Stop()))
        shell.run()

    def _assemble(self, workers: Workers, curves: Curves, budget: int, rss_idle: int) -> SessionLoop:
        """Make and start everything around the session; return its loop."""
        config = self._config
        session = WorkerSession(config.device_id, config.site, budget)
        self._meter = meter = Meter(curves)
        self._links = open_links(config, self._topics, self._start.boot, self._complaints, self._loader.post)
        self._caps = messages.Caps(
            device=config.device_id,
            boot=self._start.boot,
            cores=psutil.cpu_count() or 1,
            threads=config.threads,
            memory_budget_bytes=budget,
            rss_idle_bytes=rss_idle,
            isa=isa(),
            version=__version__,
            curves=curves,
            largest_packet_bytes=0,
            mqtt=0,
            public_key=public_key(self._private_key),
        )
        self._builder = BuilderThread(config.device_id, self._topics, workers, self.inbox.post, self._budget)
        self._shell = shell = SessionLoop(
            session,
            self._start,
            self.inbox,
            self._network,
            self._loader,
            self._builder,
            meter,
            self._complaints,
            self._announce,
            self._log,
            self._links,
            self._private_key,
            self._budget,
        )
        self._heartbeat = HeartbeatThread(
            self._topics,
            config.device_id,
            self._start.boot,
            self._network,
            HealthMonitor(config.url),
            meter,
            lambda: shell.last_op_s,
            lambda: self._counters(session),
            self._links,
            self.inbox,
            self._complaints,
        )
        self._tuning = BackgroundTuning(
            measurement_file(self._places.state, config.threads),
            config.threads,
            config.memory_bytes or free_memory(),
            meter,
            self._budget,
            self._publish_caps,
            self._log,
        )
        self._loader.start()
        self._builder.start()
        return shell

    def close(self) -> None:
        """End all threads; the last word is `offline`."""
        if self._tuning is not None:
            self._tuning.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
        farewell = self._reached if self._shell is None else self._shell.announce_offline
        fault = self.fault if self._shell is None else self._shell.fault or self.fault
        self._network.close(
            self._offline(fault or messages.STOPPED) if farewell else None
        )  # others need not wait for the rest
        if self._links is not None:
            self._links.close()
        self._loader.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._builder is not None:
            self._builder.close()
        if self._workers is not None:
            self._workers.close()
        if self._shell is not None and farewell and not fault:
            self._saved.save(self._shell.end())

    def _serve_metrics(self, address: tuple[str, int]) -> MetricsServer:
        """Serve the last heartbeat's numbers; raises ConfigError without the extra, NetworkError for the address."""
        with requires_extra("metrics", "--metrics"):
            from hepti_mqtt.transport.metrics import serve_device
        return serve_device(
            address, self._config.device_id, lambda: None if self._heartbeat is None else self._heartbeat.last
        )

    # -- parts ---------------------------------------------------------------------------------------------------

    def _offline(self, reason: str = "") -> Will:
        topic = self._topics.status(self._config.device_id)
        return Will(topic, self._status("offline", reason), 1, True)

    def _status(self, state: Literal["online", "offline"], reason: str = "") -> bytes:
        start = self._start
        return messages.encode_status(
            messages.Status(state, start.boot, version=__version__, term=start.term, reason=reason)
        )

    def _transport(self, plane: Plane, on_message: OnMessage, on_state: OnState) -> BrokerConnection:
        config = self._config
        # Two agents of one name must both stay connected until one of them has to stop.
        client_id = f"hepti-{config.site}-{config.device_id}-{plane}-{self._start.boot:08x}"
        name = f"hepti-{plane}"
        kind: type[BrokerConnection] = DataConnection if plane == "data" else BrokerConnection
        connection = kind(config.url, client_id, on_message=on_message, on_state=on_state, name=name)
        if plane == "control":
            self._control = connection
        return connection

    def _connect(self, planes: tuple[Plane, ...]) -> tuple[Plane, ...]:
        """Connect planes once; return the planes without a broker. Raises NetworkError without `retry`."""
        for place, plane in enumerate(planes):
            try:
                if plane == "control":
                    self._claim_name()
                self._network.connect(plane, CONNECT_TIMEOUT_S)
            except NetworkError as exc:
                if not self._config.retry:
                    raise
                if planes == PLANES and place == 0:
                    self._log.warning("%s; retrying until the broker answers", exc)
                return planes[place:]
        return ()

    def _claim_name(self) -> None:
        """Claim the next start of this name; before the connection, because its will names the start."""
        if not self._start.term:
            topic, name = self._topics.status(self._config.device_id), f"hepti-{self._config.site}"
            name = f"{name}-{self._config.device_id}"
            self._start = claim(self._config.url, topic, name, self._start.boot, CONNECT_TIMEOUT_S).start
            self._control.will = self._offline()

    def _wait_for_broker(self, waiting: tuple[Plane, ...], signals: StopSignals) -> None:
        backoff = Backoff()
        while waiting and not signals.requested.wait(backoff.pause_s()):
            still = self._connect(waiting)
            if not still:
                self._log.info("connected to the broker")
            waiting = still

    def _warn_if_open(self) -> None:
        if (loud := open_broker_warning(self._config.url)) is not None:
            self._log.warning(loud)

    def _publish_starting(self, status: messages.Status) -> None:
        if self._reached:
            topic = self._topics.status(self._config.device_id)
            self._network.publish("control", topic, messages.encode_status(status), 1, True)

    def _measure(self, starting: StartupStatus) -> tuple[Workers, Curves]:
        config = self._config
        started_s = time.time()
        prepare_kernels(starting, self._log)
        self._workers = workers = Workers(config.threads)
        waiting = partial(starting.update, "waiting for another agent on this machine to measure")
        with compile_lock(jit.cache_directory(), waiting):
            starting.update("measuring")
            start = time.perf_counter()
            curves, cached = load_or_measure(
                measurement_file(self._places.state, config.threads),
                workers,
                config.memory_bytes or free_memory(),
                with_narrow_weights=False,
                trusted_since_s=started_s,
            )
        self._log.info("measured in %.1f s%s", time.perf_counter() - start, " (cached)" if cached else "")
        release_compiler()
        return workers, curves

    def _announce(self, link: Connected) -> int | None:
        device = self._config.device_id
        largest, limit = self._packets.largest(link.protocol, link.largest_packet_bytes)
        self._caps = replace(self._caps, largest_packet_bytes=largest or 0, mqtt=link.protocol)
        self._prober.set_packet_limit(limit, link.local)
        self._publish_caps()
        self._is_announced = True
        self._announce_status()
        self._log.info("%s is online at site %s (start %d)", device, self._config.site, self._start.term)
        if self._heartbeat is not None:
            self._heartbeat.start()
        if self._tuning is not None:
            self._tuning.start()
        return limit

    def _announce_status(self) -> None:
        """Publish that this device is online, with the trouble of its cache."""
        status = self._status("online", self._cache.trouble)
        self._network.publish("control", self._topics.status(self._config.device_id), status, 1, True)

    def _cache_changed(self) -> None:
        if self._is_announced:
            try:
                self._announce_status()
            except NetworkError as exc:  # the next connection announces it
                self._complaints.record("publish_refused", f"cannot publish the cache's trouble now: {exc}")

    def _publish_caps(self) -> None:
        address = mesh_address(self._config)  # it may change with the route to the broker
        endpoint = None if self._links is None or address is None else self._links.endpoint(address)
        caps = replace(self._caps, curves=self._meter.curves, endpoint=endpoint)
        self._network.publish("control", self._topics.caps(self._config.device_id), messages.encode_caps(caps), 1, True)

    def _loading(self, event: LoadEvent) -> None:
        self.inbox.post(event)
        if self._config.on_load_event is not None:
            self._config.on_load_event(event)

    def _read_caches(self, order: ReadCaches) -> None:
        """Report the saved KV caches of a layout; on the loader's thread, before the weights are loaded."""
        try:
            caches = self._saved.take(order.layout)
        except OSError as error:
            self._log.warning("saved KV caches cannot be read: %s", error.strerror or error)
            return
        if caches:
            self.inbox.post(CachesRead(order.model, order.plan_version, caches))

    def _request_tiles(self, model: str, hashes: tuple[bytes, ...], share: float) -> None:
        self._report(
            messages.RequestTiles(model, hashes, share), "asks_lost", "request weights"
        )  # lost requests become overdue

    def _report_cached(self, tiles: messages.CachedTiles) -> None:
        self._report(tiles, "reports_lost", "report cached weights")  # the next connection reports them

    def _report(self, message: messages.RequestTiles | messages.CachedTiles, kind: str, deed: str) -> None:
        """Send a message to the planner; count it as lost if the broker is away."""
        try:
            self._network.publish("control", self._topics.reports(self._config.device_id), messages.encode(message), 1)
        except NetworkError as exc:
            self._complaints.record(kind, f"cannot {deed} now: {exc}")

    def _send_to_peer(self, peer: str, model: str, kind: MessageKind, body: bytes) -> bool:
        return self._links is not None and self._links.send_tiles(peer, model, kind, body)

    def _counters(self, session: WorkerSession) -> Mapping[str, int]:
        # Copies first, each in one step, because other threads count concurrently.
        kept = [dict(counters) for counters in (session.counters, self._complaints.counters, self._loader_counters)]
        if self._links is not None:
            kept.append({"compiled_frames": self._links.compiled_frames})
        return {name: n for counters in (*kept, self._network.counters()) for name, n in counters.items()}
