"""Installation files of one device: its directories, and the lock that keeps a second agent out."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

import platformdirs
import psutil

from device_agent.background import BackgroundTuning, StartupStatus, prepare_kernels
from device_agent.config import AgentConfig
from device_agent.heartbeat import HeartbeatThread, Meter
from device_agent.links import MeshEndpoint
from device_agent.loader import LoaderThread, LoadEvent, TileCache, WeightLoader
from device_agent.machine import HealthMonitor, free_memory, memory_budget
from device_agent.measure import Curves, file_stamps, load_or_measure, measurement_files
from device_agent.network import PLANES, AgentEvent, ErrorLog, LinkUp, Network, PeerProbeDue, Stop
from device_agent.probes import Prober
from device_agent.shell import BuilderThread, SessionLoop
from hepti_mqtt import __version__
from hepti_mqtt.config.process import stop_signals
from hepti_mqtt.config.settings import data_link
from hepti_mqtt.config.state import next_boot
from hepti_mqtt.errors import ConfigError, NetworkError
from hepti_mqtt.ids import check_name
from hepti_mqtt.kernels import Workers, isa, jit
from hepti_mqtt.kernels.compile_cache import compile_lock
from hepti_mqtt.kernels.cpu import require_known
from hepti_mqtt.kernels.jit import release_compiler, return_large_blocks
from hepti_mqtt.protocol.messages import Caps, RequestTiles, Status, encode, encode_caps, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Plane
from hepti_mqtt.runtime.worker.session import WorkerSession
from hepti_mqtt.transport import (
    DataConnection,
    Inbox,
    OnMessage,
    OnState,
    PacketLimit,
    PahoTransport,
    Transport,
    Will,
    data_connection_possible,
    open_broker_warning,
)

APP: Final = "hepti"


class AgentDirectories(NamedTuple):
    """Where one device keeps its state (boot counter, lock, measurement) and its weight tiles."""

    state: Path
    tiles: Path


def agent_directories(root: Path | None, site: str, device: str) -> AgentDirectories:
    """Return the directories of one device, made if missing: below `root`, or in the user's own places.

    Raises BadNameError for names that cannot stand in topics, ConfigError if a directory cannot be made.
    """
    state = root if root is not None else platformdirs.user_state_path(APP) / "agents"
    cache = root if root is not None else platformdirs.user_cache_path(APP) / "agents"
    own = Path(check_name("site", site)) / check_name("device", device)
    found = AgentDirectories(state / own, cache / own / "tiles")
    for path in found:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"cannot make the agent's directory {path}: {exc}; choose another with --cache") from exc
    return found


@contextmanager
def device_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of one device's directory; the system lets go of it when the process ends, however it ends.

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
        with suppress(OSError):  # on a full disk the lock holds all the same; only who holds it is not told
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode("ascii"))
        yield
    finally:
        os.close(handle)


# ----------------------------------------------------------------------------------------------------------------------
# How an agent is told to end.


class StopRequested(BaseException):
    """The device is told to end before its session thread runs.

    No KeyboardInterrupt: one that passes through `exec`, as in many an import, makes Python kill itself with SIGINT in
    the end, whoever has caught it.
    """


class StopSignals:
    """Signals to end: an event for the session thread once it runs, an interrupt before, nothing while all ends.

    An interrupt is lost where it falls into a callback, of a weak reference for example, so what was asked is kept too.
    """

    def __init__(self) -> None:
        self._inbox: Inbox[AgentEvent] | None = None
        self._asked = self._ending = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def deliver_to(self, inbox: Inbox[AgentEvent]) -> None:
        """From now on the session thread ends in its own time."""
        self._inbox = inbox
        if self._asked:
            inbox.post(Stop())

    def raise_if_requested(self) -> None:
        """Interrupt again if the device was told to end before the session thread runs."""
        if self._asked:
            raise StopRequested

    def ignore_further(self) -> None:
        """From now on the device ends: whoever says so again interrupts nothing."""
        self._ending = True

    def _handle(self, *_: object) -> None:
        self._asked = True
        if self._inbox is not None:
            self._inbox.post(Stop())
        elif not self._ending:
            raise StopRequested


# ----------------------------------------------------------------------------------------------------------------------
# The agent: one device's process, from its installation files to its last word.


SWITCH_INTERVAL_S: Final = 0.0005
CONNECT_TIMEOUT_S: Final = 5.0
BACKOFF_S: Final = (0.2, 5.0)
STOP_POLL_S: Final = 0.1


def run_agent(config: AgentConfig, stop: threading.Event | None = None) -> None:
    """Be a device until `stop` is set or, in the main thread, until SIGTERM or SIGINT.

    Raises ConfigError (names, options, environment, a second agent of the same name), RefusedError (credentials, access
    list), and without `retry` NetworkError if the broker is absent at the start.
    """
    if config.threads < 1:
        raise ConfigError(f"an agent needs at least one thread, got {config.threads}; choose another --threads")
    data_link()
    require_known()
    return_large_blocks()
    places = agent_directories(config.cache_dir, config.site, config.device_id)
    with device_lock(places.state), StopSignals() as signals:
        agent: _Agent | None = None
        try:
            # A cache that is opened leaves room on the disk: tiles go before the boot counter does.
            room = partial(TileCache, places.tiles, config.cache_bytes or 1, Counter())
            agent = _Agent(config, places, next_boot(places.state, free_space=room))
            with _watching(stop, agent.inbox):
                agent.run(signals, stop or threading.Event())
        except StopRequested:
            signals.ignore_further()
            config.log.info("stopped before the device was online")
        finally:
            signals.ignore_further()
            if agent is not None:
                agent.close()


@contextmanager
def _watching(stop: threading.Event | None, inbox: Inbox[AgentEvent]) -> Iterator[None]:
    """Turn a set `stop` into an event of the session thread."""
    over = threading.Event()

    def watch(stop: threading.Event) -> None:
        while not over.is_set():
            if stop.wait(STOP_POLL_S):
                inbox.post(Stop())
                return

    if stop is None:
        yield
        return
    thread = threading.Thread(target=watch, args=(stop,), name="hepti-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Agent:
    """All parts of one agent, wired."""

    def __init__(self, config: AgentConfig, places: AgentDirectories, boot: int) -> None:
        self._config, self._boot, self._places = config, boot, places
        self._log = config.log
        self._topics = Topics(config.site)
        self.inbox: Inbox[AgentEvent] = Inbox()
        self._complaints = ErrorLog(self._log)
        self._loader_counters: Counter[str] = Counter()
        self._prober = Prober(config.device_id, boot)
        cache = TileCache(places.tiles, config.cache_bytes, self._loader_counters)
        weights = WeightLoader(cache, self._loading, self._request_tiles, self._loader_counters)
        self._loader = LoaderThread(weights, self._loader_counters, self._log)
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
        self._afterwards: BackgroundTuning | None = None
        self._endpoint: MeshEndpoint | None = None
        self._packets = PacketLimit(
            config.url,
            f"hepti-{config.site}-{config.device_id}-size",
            Topics(config.site).probe(config.device_id),
            self._complaints.record,
        )
        self._reached = False  # whether the site has been told that the device is starting
        self._announced: tuple[int | None, LinkUp] | None = None  # with what caps were last told

    def run(self, signals: StopSignals, stop: threading.Event) -> None:
        """Connect, measure, and work."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        waiting = self._connect(PLANES)  # first of all, so that a wrong password is told at once
        self._reached = "control" not in waiting
        if not waiting:
            self._warn_if_open()
        with StartupStatus(self._publish_starting, self._boot, self._log) as starting:
            workers, curves = self._measure(starting)
        signals.raise_if_requested()
        rss_idle = int(psutil.Process().memory_info().rss)
        budget = memory_budget(self._config.memory_bytes, free_memory())
        self._log.info("idle at %.0f MiB, %.0f MiB for weights", rss_idle / 2**20, budget / 2**20)
        if waiting:
            self._wait_for_broker(waiting, signals, stop)
            self._warn_if_open()
        session = WorkerSession(self._config.device_id, self._config.site, budget)
        meter = Meter(curves)
        self._endpoint = MeshEndpoint(self._config, self._topics, self._boot, self._complaints)
        caps = self._caps(meter, budget, rss_idle)
        self._builder = BuilderThread(self._config.device_id, self._topics, workers, self.inbox.post)
        shell = SessionLoop(
            session,
            self._boot,
            self.inbox,
            self._network,
            self._loader,
            self._builder,
            meter,
            self._complaints,
            lambda link: self._announce(caps, link),
            self._log,
            self._endpoint.links,
        )
        self._shell = shell
        self._heartbeat = HeartbeatThread(
            self._topics,
            self._config.device_id,
            self._boot,
            self._network,
            HealthMonitor(self._config.url),
            self._prober,
            meter,
            lambda: shell.last_op_s,
            lambda: self._counters(session),
            self._endpoint.peer_reports(lambda: self.inbox.post(PeerProbeDue())),
            self._complaints,
        )
        self._afterwards = self._make_background_tuning(meter, caps, shell)
        self._loader.start()
        self._builder.start()
        signals.deliver_to(self.inbox)
        shell.run()

    def close(self) -> None:
        """End all threads; the last word is `offline`."""
        if self._afterwards is not None:
            self._afterwards.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
        farewell = self._reached if self._shell is None else self._shell.announce_offline
        self._network.close(self._will() if farewell else None)
        if self._endpoint is not None:
            self._endpoint.close()
        self._loader.close()
        if self._builder is not None:
            self._builder.close()
        if self._workers is not None:
            self._workers.close()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _will(self) -> Will:
        status = encode_status(Status("offline", self._boot, version=__version__))
        return Will(self._topics.status(self._config.device_id), status, 1, True)

    def _transport(self, plane: Plane, on_message: OnMessage, on_state: OnState) -> Transport:
        config = self._config
        client_id, name = f"hepti-{config.site}-{config.device_id}-{plane}", f"hepti-{plane}"
        if plane == "data" and data_link() != "paho" and data_connection_possible():
            return DataConnection(config.url, client_id, on_message=on_message, on_state=on_state, name=name)
        return PahoTransport(
            config.url,
            client_id,
            on_message=on_message,
            on_state=on_state,
            # MQTT 5 costs paho more per frame than 3.1.1 and gives the data plane nothing.
            protocol=None if plane == "control" else 4,
            will=self._will() if plane == "control" else None,
            name=name,
        )

    def _connect(self, planes: tuple[Plane, ...]) -> tuple[Plane, ...]:
        """Connect planes once; return those for which no broker was there. Raises NetworkError without `retry`."""
        for place, plane in enumerate(planes):
            try:
                self._network.connect(plane, CONNECT_TIMEOUT_S)
            except NetworkError as exc:
                if not self._config.retry:
                    raise
                if planes == PLANES and place == 0:
                    self._log.warning("%s; trying again until it is there", exc)
                return planes[place:]
        return ()

    def _wait_for_broker(self, waiting: tuple[Plane, ...], signals: StopSignals, stop: threading.Event) -> None:
        delay_s = BACKOFF_S[0]
        while waiting and not stop.wait(delay_s * random.uniform(0.5, 1.0)):
            signals.raise_if_requested()
            delay_s = min(2 * delay_s, BACKOFF_S[1])
            still = self._connect(waiting)
            if not still:
                self._log.info("the broker is there")
            waiting = still

    def _warn_if_open(self) -> None:
        if (loud := open_broker_warning(self._config.url)) is not None:
            self._log.warning(loud)

    def _publish_starting(self, status: Status) -> None:
        if self._reached:
            topic = self._topics.status(self._config.device_id)
            self._network.publish("control", topic, encode_status(status), 1, True)

    def _measure(self, starting: StartupStatus) -> tuple[Workers, Curves]:
        config = self._config
        places = measurement_files(self._places.state, jit.cache_directory(), config.threads)
        before = file_stamps(places)
        prepare_kernels(config.threads, starting, self._log)
        self._workers = workers = Workers(config.threads)
        memory_bytes = config.memory_bytes or free_memory()
        with compile_lock(jit.cache_directory(), partial(starting.update, "waiting for others here that start")):
            starting.update("measuring")
            start = perf_counter()
            curves, cached = load_or_measure(places, workers, memory_bytes, jit.all_ready(), stamps_at_start=before)
        self._log.info(
            "measured in %.1f s%s", perf_counter() - start, " (as before, or by a neighbour)" if cached else ""
        )
        release_compiler()
        return workers, curves

    def _make_background_tuning(
        self, meter: Meter, caps: Callable[[int | None, int], Caps], shell: SessionLoop
    ) -> BackgroundTuning:
        """Return what goes on beside the session, from when the device is online for the first time."""
        config = self._config

        def announce() -> None:
            assert self._announced is not None
            largest, link = self._announced
            topic = self._topics.caps(config.device_id)
            self._network.publish("control", topic, encode_caps(caps(largest, link.protocol)), 1, True)

        memory_bytes = config.memory_bytes or free_memory()
        return BackgroundTuning(
            measurement_files(self._places.state, jit.cache_directory(), config.threads),
            config.threads,
            memory_bytes,
            meter,
            lambda: shell.last_op_s,
            announce,
            self._log,
        )

    def _caps(self, meter: Meter, budget: int, rss_idle: int) -> Callable[[int | None, int], Caps]:
        config = self._config
        return lambda largest, protocol: Caps(
            device=config.device_id,
            boot=self._boot,
            cores=psutil.cpu_count() or 1,
            threads=config.threads,
            memory_budget_bytes=budget,
            rss_idle_bytes=rss_idle,
            isa=isa(),
            version=__version__,
            curves=meter.curves,
            largest_packet_bytes=largest or 0,
            mqtt=protocol,
            endpoint=None if self._endpoint is None else self._endpoint.advertised(),
        )

    def _announce(self, caps: Callable[[int | None, int], Caps], link: LinkUp) -> int | None:
        device = self._config.device_id
        largest, limit = self._packets.largest(link.protocol, link.largest_packet_bytes)
        self._announced = largest, link
        self._prober.set_packet_limit(limit, link.broker_is_local)
        self._network.publish("control", self._topics.caps(device), encode_caps(caps(largest, link.protocol)), 1, True)
        online = encode_status(Status("online", self._boot, version=__version__))
        self._network.publish("control", self._topics.status(device), online, 1, True)
        self._log.info("%s is online at site %s (boot %d)", device, self._config.site, self._boot)
        if self._heartbeat is not None:
            self._heartbeat.start()
        if self._afterwards is not None:
            self._afterwards.start()
        return limit

    def _loading(self, event: LoadEvent) -> None:
        self.inbox.post(event)
        if self._config.on_load_event is not None:
            self._config.on_load_event(event)

    def _request_tiles(self, model: str, hashes: tuple[bytes, ...]) -> None:
        try:
            self._network.publish(
                "control", self._topics.reports(self._config.device_id), encode(RequestTiles(model, hashes)), 1
            )
        except NetworkError as exc:
            self._complaints.record("asks_lost", f"cannot ask for weights now: {exc}")  # asked again after a while

    def _counters(self, session: WorkerSession) -> Mapping[str, int]:
        # Copies first, each in one step: other threads count meanwhile.
        kept = [dict(counters) for counters in (session.counters, self._complaints.counters, self._loader_counters)]
        return {name: n for counters in (*kept, self._network.counters()) for name, n in counters.items()}
