"""A site of real processes that faults happen to."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from site_processes import Site, poll

from hepti_mqtt.embedded_broker import EmbeddedBroker

DEVICES = ("a", "b", "c")
AIMED = 0.8  # of the faults of agents, at one that serves
STOPPED_S = (3.0, 8.0)
CUT_S = (0.2, 3.0)
SAVED_S = 30.0  # more than the broker's `autosave_interval`


class Cable:
    """A way to the broker that can be cut: a port that passes everything on."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._ends: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._whole = True
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections and let no others through."""
        with self._lock:
            self._whole = False
            ends, self._ends = self._ends, set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._whole = True

    def close(self) -> None:
        self.cut()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self._pass(near)

    def _pass(self, near: socket.socket) -> None:
        try:
            with self._lock:
                if not self._whole:
                    raise ConnectionError("cut")
                far = socket.create_connection(("127.0.0.1", self._to), timeout=1.0)
                far.settimeout(None)
                self._ends |= {near, far}
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for a, b in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._ends.discard(source)
        source.close()  # the other end is closed by whoever reads from it


@dataclass(frozen=True)
class Fault:
    """What happens, to whom, when (seconds after the start), and for how long if it passes by itself.

    aimed: it is to happen to an agent that serves then, whoever that is. served: whether that one did.
    """

    at_s: float
    kind: str
    whom: str
    lasts_s: float = 0.0
    aimed: bool = False
    served: bool = False

    def among(self, serving: Collection[str]) -> Fault:
        """Return the fault as it is to happen while these devices serve."""
        elsewhere = self.aimed and serving and self.whom not in serving
        whom = min(serving) if elsewhere else self.whom
        return replace(self, whom=whom, served=whom in serving)

    def __str__(self) -> str:
        serves = f", which {'serves' if self.served else 'does not serve'}" if self.kind.startswith("agent") else ""
        return f"{self.kind}: {self.whom}{serves}" + (f", for {self.lasts_s:.1f} s" if self.lasts_s else "")


def mosquitto_of(broker: EmbeddedBroker) -> psutil.Process:
    """Return the process that its keeper has started."""
    keeper = broker._process
    assert keeper is not None
    (mosquitto,) = psutil.Process(keeper.pid).children()
    return mosquitto


def kill_broker(broker: EmbeddedBroker) -> None:
    """Pull Mosquitto's plug; `broker.start()` brings it back with what it has saved."""
    mosquitto_of(broker).kill()
    broker.stop()  # what is left of it


def wait_until_saved(broker: EmbeddedBroker) -> None:
    """Return when Mosquitto has saved what it keeps by now: a kill takes nothing of that."""
    place, now = broker._directory / "mosquitto.db", time.time()
    poll(lambda: place.exists() and place.stat().st_mtime > now, "a save of the broker", SAVED_S)


KINDS = ("planner killed", "broker killed", "broker restarted", "agent killed", "agent stopped", "agent cut off")


def schedule(
    seed: int, seconds: float, every_s: tuple[float, float], kinds: tuple[str, ...] = KINDS
) -> Iterator[Fault]:
    """Yield the faults of a run; each kind comes once in every round, in an order of its own.

    Most of those of agents are aimed at one that serves: who only stands by is missed by nobody.
    """
    rng, aim = random.Random(seed), random.Random(f"aim {seed}")
    at_s, round_ = 0.0, list[str]()
    while True:
        at_s += rng.uniform(*every_s)
        if at_s > seconds:
            return
        round_ = round_ or rng.sample(kinds, len(kinds))
        kind = round_.pop()
        whom = rng.choice(DEVICES) if kind.startswith("agent") else kind.partition(" ")[0]
        lasts = {"agent stopped": STOPPED_S, "agent cut off": CUT_S}.get(kind, (0.0, 0.0))
        aimed = kind.startswith("agent") and aim.random() < AIMED
        yield Fault(at_s, kind, whom, rng.uniform(*lasts), aimed)


class Installed(Site):
    """Processes that find their modules' bytecode, as those of an installation do, whatever the tests' own do."""

    @property
    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in super().environment.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return inherited | {"PYTHONPYCACHEPREFIX": str(self.directory / "bytecode")}


class FaultySite:
    """Broker, planner and agents; every fault is mended at once, or after as long as it lasts."""

    def __init__(self, directory: Path, broker: EmbeddedBroker, model: Path) -> None:
        self.broker = broker
        self.cables = {name: Cable(broker.port) for name in DEVICES}
        self.site = Installed(directory, broker, {"model": model})
        self._agent_sites = {}
        for name, cable in self.cables.items():
            self._agent_sites[name] = Installed(directory, broker, {})
            self._agent_sites[name].url = f"mqtt://127.0.0.1:{cable.port}"
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._does: dict[str, Callable[[Fault], None]] = {
            "planner killed": lambda _: self._kill_planner(),
            "broker killed": lambda _: self._kill_broker(),
            "broker restarted": lambda _: self.broker.restart(),
            "agent killed": lambda fault: self._kill_agent(fault.whom),
            "agent stopped": self._stop_agent,
            "agent cut off": self._cut_agent,
        }

    def start(self) -> None:
        self.site.planner()
        for name in DEVICES:
            self._agent_sites[name].agent(name)

    def happen(self, fault: Fault) -> None:
        """Let a fault happen."""
        self._does[fault.kind](fault)

    def mend(self, now: float) -> None:
        """End the faults that have lasted long enough, and look whether anybody has ended by itself."""
        due = [later for later in self._later if later[0] <= now]
        self._later = [later for later in self._later if later[0] > now]
        for _, action in due:
            action()
        for site in (self.site, *self._agent_sites.values()):
            for name, process in site.running.items():
                assert process.poll() is None, f"{name} has ended by itself: {site.log(name)[-2000:]}"

    def mend_all(self) -> None:
        self.mend(float("inf"))

    def close(self) -> None:
        for site in (self.site, *self._agent_sites.values()):
            site.close()
        for cable in self.cables.values():
            cable.close()

    def _kill_planner(self) -> None:
        self.site.kill("planner")
        self.site.planner()

    def _kill_broker(self) -> None:
        kill_broker(self.broker)
        self.broker.start()

    def _kill_agent(self, name: str) -> None:
        site = self._agent_sites[name]
        site.kill(name)
        site.agent(name)

    def _stop_agent(self, fault: Fault) -> None:
        process = self._agent_sites[fault.whom].running[fault.whom]
        process.send_signal(signal.SIGSTOP)
        self._later.append((time.monotonic() + fault.lasts_s, lambda: process.send_signal(signal.SIGCONT)))

    def _cut_agent(self, fault: Fault) -> None:
        cable = self.cables[fault.whom]
        cable.cut()
        self._later.append((time.monotonic() + fault.lasts_s, cable.mend))
