"""A site of real processes that faults happen to."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack
from broker_kinds import process_of
from relay import Relay
from site_load import DEVICES
from site_processes import SITE, Site, Voice, poll

from hepti_mqtt.embedded_broker import EmbeddedBroker
from hepti_mqtt.protocol.topics import Topics

AIMED = 0.8  # of the faults of agents, at one that serves
STOPPED_S = (3.0, 8.0)
CUT_S = (0.2, 3.0)
SAVED_S = 30.0  # more than the broker's `autosave_interval`


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


def kill_broker(broker: EmbeddedBroker) -> None:
    """Pull Mosquitto's plug; `broker.start()` brings it back with what it has saved."""
    process_of(broker).kill()
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
    while kinds:
        at_s += rng.uniform(*every_s)
        if at_s > seconds:
            return
        round_ = round_ or rng.sample(kinds, len(kinds))
        kind = round_.pop()
        whom = rng.choice(DEVICES) if kind.startswith("agent") else kind.partition(" ")[0]
        lasts = {"agent stopped": STOPPED_S, "agent cut off": CUT_S}.get(kind, (0.0, 0.0))
        aimed = kind.startswith("agent") and aim.random() < AIMED
        yield Fault(at_s, kind, whom, rng.uniform(*lasts), aimed)


class Serving(Voice):
    """Hears which devices the active plans have."""

    def __init__(self, url: str) -> None:
        self._devices: dict[str, frozenset[str]] = {}  # by topic
        super().__init__(url, Topics(SITE).all_plans())

    @property
    def devices(self) -> frozenset[str]:
        return frozenset().union(*self._devices.values())

    def hear(self, topic: str, payload: bytes) -> None:
        active = (msgpack.unpackb(payload) if payload else {}).get("active") or {}
        self._devices = {**self._devices, topic: frozenset(active.get("devices", ()))}


class Installed(Site):
    """Processes that find their modules' bytecode, as those of an installation do, whatever the tests' own do."""

    @property
    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in super().environment.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return inherited | {"PYTHONPYCACHEPREFIX": str(self.directory / "bytecode")}


class FaultySite:
    """Broker, planner and agents; every fault is repaired at once, or after as long as it lasts.

    away_s: until a planner or an agent that was killed is started again.
    """

    def __init__(
        self, directory: Path, broker: EmbeddedBroker, models: Mapping[str, Path], away_s: float = 0.0
    ) -> None:
        self.broker, self._away_s = broker, away_s
        self.cables = {name: Relay(broker.port) for name in DEVICES}
        self.site = Installed(directory, broker, models)
        self._agent_sites = {}
        for name, cable in self.cables.items():
            self._agent_sites[name] = Installed(directory, broker, {})
            self._agent_sites[name].url = cable.url
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._does: dict[str, Callable[[Fault], None]] = {
            "planner killed": lambda _: self._kill_planner(),
            "broker killed": lambda _: self._kill_broker(),
            "broker restarted": lambda _: (self.broker.stop(), self.broker.start()),
            "agent killed": lambda fault: self._kill_agent(fault.whom),
            "agent stopped": self._stop_agent,
            "agent cut off": self._cut_agent,
        }

    def start(self) -> None:
        self.site.planner()
        for name in DEVICES:
            self._agent_sites[name].agent(name)

    @property
    def running(self) -> dict[str, subprocess.Popen[bytes]]:
        """Return all processes by name."""
        return {n: p for site in (self.site, *self._agent_sites.values()) for n, p in site.running.items()}

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

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        if seconds:
            self._later.append((time.monotonic() + seconds, action))
        else:
            action()

    def _kill_planner(self) -> None:
        self.site.kill("planner")
        self._after(self._away_s, self.site.planner)

    def _kill_broker(self) -> None:
        kill_broker(self.broker)
        self.broker.start()

    def _kill_agent(self, name: str) -> None:
        site = self._agent_sites[name]
        site.kill(name)
        self._after(self._away_s, lambda: site.agent(name))

    def _stop_agent(self, fault: Fault) -> None:
        process = self._agent_sites[fault.whom].running[fault.whom]
        process.send_signal(signal.SIGSTOP)
        self._later.append((time.monotonic() + fault.lasts_s, lambda: process.send_signal(signal.SIGCONT)))

    def _cut_agent(self, fault: Fault) -> None:
        cable = self.cables[fault.whom]
        cable.refusing = True
        cable.cut()
        self._later.append((time.monotonic() + fault.lasts_s, lambda: setattr(cable, "refusing", False)))
