"""A site of Hepti on a lab's hosts: a broker, a planner beside it, one agent per device."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from hepti_mqtt.config import Settings
from hepti_mqtt.config.options import AgentOptions, PlannerOptions, site_arguments
from hepti_mqtt.errors import ConfigError, LabError
from hepti_mqtt.ids import check_name
from hepti_mqtt.lab.hosts import Completed, Host, Running, Talking
from hepti_mqtt.lab.spec import HUB, LabSpec

SITE: Final = "lab"
BROKER: Final = "broker"
PLANNER: Final = "planner"
COMPILE_S: Final = 180.0  # a Pi compiles every kernel in about two minutes, once
ONLINE_S: Final = 120.0
LOADED_S: Final = 900.0  # until the first plans are active: weights of a large model take minutes over a slow link
STOP_S: Final = 10.0
IDLE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """One agent: the host it runs on (and is named after), its threads, its memory for weights such as 600MiB."""

    host: Host
    threads: int = 1
    memory: str | None = None


@dataclass
class LabSite:
    """Hepti's processes on the hosts of a lab; a context manager: up on entry, everything ended on exit.

    hub: the host of the clients, and of broker and planner unless others are named. devices: the agents. models:
    name -> directory on this machine. Agents start and compile at full speed; then every host is throttled, and only
    then they measure themselves, one after the other, so that the planner plans with what the hosts will have.
    """

    hub: Host
    devices: Sequence[Device]
    models: Mapping[str, Path]
    broker_host: Host | None = None
    planner_host: Host | None = None
    url: str = field(init=False, default="")
    _running: dict[str, Running] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        names = [check_name("device", d.host.name) for d in self.devices]
        if not names or len(set(names)) != len(names) or {BROKER, PLANNER} & set(names):
            raise ConfigError(
                f"a site needs devices with names of their own, none of them {BROKER} or {PLANNER}; got {names}"
            )

    @classmethod
    def of(
        cls,
        spec: LabSpec,
        hub: Host,
        hosts: Mapping[str, Host],
        models: Mapping[str, Path],
    ) -> Self:
        """Return the site that a lab file describes. hub, hosts: the lab's, by the names in `spec`."""
        everywhere = {**hosts, HUB: hub}
        return cls(
            hub,
            [Device(hosts[h.name], h.threads, agent_memory(h.memory_bytes)) for h in spec.hosts],
            models,
            everywhere[spec.broker or HUB],
            everywhere[spec.planner or spec.broker or HUB],
        )

    def start(self) -> None:
        """Start everything and return when all agents are online and every model has a plan; raises LabError."""
        self.throttle(False)
        for shared in {device.host.shared for device in self.devices} - {""}:
            shutil.rmtree(shared, ignore_errors=True)  # of another hour, in which this machine was faster or slower
            Path(shared).mkdir(parents=True)
        self._start_broker(port=0)
        self._running[PLANNER] = self._start_planner()
        agents = [self._start_agent(device) for device in self.devices]
        for agent in agents:
            _await_compiled(agent)
        self.throttle(True)
        for device, agent in zip(self.devices, agents, strict=True):
            agent.send(f"measure {device.host.shared}")
            self._await([device.host.name], (), ONLINE_S)  # one after the other: neighbours share cores and caches
        self.throttle(False)  # the first plans' weights are loaded at full speed
        self.wait_ready()
        self.throttle(True)

    def wait_ready(self, timeout_s: float = LOADED_S) -> dict[str, Any]:
        """Return what the devices say and each model's plan, once all are there; raises LabError naming who is not."""
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            try:
                return self._await([d.host.name for d in self.devices], list(self.models), min(left, ONLINE_S))
            except LabError:
                self.check()  # a process that has ended is no reason to wait
                if left <= ONLINE_S:
                    raise

    def throttle(self, on: bool) -> None:
        """Turn the quotas of all hosts on or off; without them weights are loaded in a tenth of the time."""
        hosts = (self.hub, self._broker_host, self._planner_host, *(d.host for d in self.devices))
        for host in {id(h): h for h in hosts}.values():
            host.throttle(on)

    def run_client(self, arguments: Sequence[str], timeout_s: float = 60.0) -> Completed:
        """Run `hepti ARGUMENTS` on the hub, connected to this site."""
        return self.hub.run(
            [self.hub.python, "-m", "hepti_mqtt.cli", *arguments], self.environment(self.hub), timeout_s
        )

    def talk(self, name: str, arguments: Sequence[str]) -> Talking:
        """Start `python ARGUMENTS` on the hub, connected to this site by its environment, and speak lines with it."""
        talking = self.hub.talk(name, [self.hub.python, *arguments], self.environment(self.hub))
        self._running[name] = talking
        return talking

    def environment(self, host: Host) -> dict[str, str]:
        """Return what a program on `host` needs to find the site, and to keep its files in the lab's directory."""
        return {
            "HEPTI_BROKER": self.url,
            "HEPTI_SITE": SITE,
            "XDG_STATE_HOME": f"{host.directory}/state",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def check(self, besides: Collection[str] = ()) -> None:
        """Raise LabError with the last words of every process that has ended by itself.

        besides: names that may have ended, since their host was killed or their work is done.
        """
        there = [(name, p) for name, p in self._running.items() if name not in besides]
        ended = [(name, p.poll(), p.log()) for name, p in there if p.poll() is not None]
        if ended:
            words = [f"{name} (exit code {code}): {_last(log)}" for name, code, log in ended]
            raise LabError("ended by itself: " + "; ".join(words))

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the process `name`: broker, planner or a device."""
        self._process(name).signal(number)

    def kill(self, name: str) -> None:
        """Pull the plug of a process: no farewell."""
        process = self._process(name)
        process.signal(signal.SIGKILL)
        process.wait(STOP_S)
        del self._running[name]

    def restart(self, name: str) -> None:
        """Start a process again, at full speed until it is compiled; kills it first if it runs."""
        if name in self._running:
            self.kill(name)
        if name == BROKER:
            self._start_broker(port=int(self.url.rpartition(":")[2]))
        elif name == PLANNER:
            self._running[PLANNER] = self._start_planner()
        else:
            device = self._device(name)
            device.host.throttle(False)
            try:
                agent = self._start_agent(device)
                _await_compiled(agent)
            finally:
                device.host.throttle(True)
            agent.send(f"measure {device.host.shared}")

    def close(self) -> None:
        """End all processes, the broker last; politely where they listen."""
        self.throttle(False)  # a host of a tenth of a core takes its time to say goodbye
        names = [n for n in self._running if n != BROKER] + [n for n in self._running if n == BROKER]
        for name in names:
            self._running[name].signal(signal.SIGTERM)
            self._running[name].signal(signal.SIGCONT)
        for name in names:
            process = self._running.pop(name)
            try:
                process.wait(STOP_S)
            except LabError:
                process.signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- parts ------------------------------------------------------------------------------------------------------

    @property
    def _broker_host(self) -> Host:
        return self.broker_host or self.hub

    @property
    def _planner_host(self) -> Host:
        return self.planner_host or self._broker_host

    def _await(self, devices: Sequence[str], models: Sequence[str], timeout_s: float) -> dict[str, Any]:
        program = [self.hub.python, "-m", "hepti_mqtt.lab.ready"]
        arguments = [*program, str(timeout_s), ",".join(devices), *models]
        done = self.hub.run(arguments, self.environment(self.hub), 2 * timeout_s)
        self.check()
        if done.code != 0:
            raise LabError(f"the site is not ready: {done.err.strip()}")
        found: dict[str, Any] = json.loads(done.out)
        return found

    def _start_broker(self, port: int) -> None:
        host = self._broker_host
        broker = host.talk(BROKER, [host.python, "-m", "hepti_mqtt.lab.broker", host.address, str(port)])
        self._running[BROKER] = broker
        self.url = json.loads(broker.receive(COMPILE_S))["url"]

    def _start_planner(self) -> Running:
        host = self._planner_host
        options = PlannerOptions({name: host.provide(path) for name, path in self.models.items()})
        program = [host.python, "-m", "hepti_mqtt.service"]
        arguments = [*program, *site_arguments(Settings(self.url, SITE)), *options.arguments()]
        return host.start(PLANNER, arguments, self.environment(host))

    def _start_agent(self, device: Device) -> Talking:
        host = device.host
        options = AgentOptions(host.name, device.threads, device.memory, hold=True)
        program = [host.python, "-m", "device_agent"]
        arguments = [*program, *site_arguments(Settings(self.url, SITE)), *options.arguments()]
        agent = host.talk(f"agent-{host.name}", arguments, {**self.environment(host), "XDG_CACHE_HOME": host.kept})
        self._running[host.name] = agent
        return agent

    def _device(self, name: str) -> Device:
        for device in self.devices:
            if device.host.name == name:
                return device
        known = ", ".join([BROKER, PLANNER, *(d.host.name for d in self.devices)])
        raise ConfigError(f"there is no {name!r} on this site; it has {known}")

    def _process(self, name: str) -> Running:
        if name in self._running:
            return self._running[name]
        if name not in (BROKER, PLANNER):
            self._device(name)
        raise LabError(f"{name} does not run; restart it first")


def agent_memory(host_bytes: int | None) -> str | None:
    """Return an agent's budget on a host with a limit: what is left beside its idle process, which takes 200 MB.

    Without it the agent would take 80 % of what the whole machine has free.
    """
    return None if host_bytes is None else str(max(host_bytes - IDLE_BYTES, host_bytes // 2))


def _await_compiled(agent: Talking) -> None:
    said = agent.receive(COMPILE_S)
    if said != "compiled":
        raise LabError(f"{agent.name} said {shlex.quote(said)} instead of compiled; its log: {_last(agent.log())}")


def _last(log: str) -> str:
    return " / ".join(log.strip().splitlines()[-5:]) or "it said nothing"
