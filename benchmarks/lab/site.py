"""A site of Hepti on a lab's hosts: broker and planner on the hub, one agent per host."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Final, Self

from benchmarks.errors import LabError
from benchmarks.lab.hosts import Host, Process
from benchmarks.lab.lab import Lab
from hepti_mqtt.cli.shared import AgentOptions
from hepti_mqtt.core.errors import ConfigError

SITE: Final = "lab"
BROKER: Final = "broker"
PLANNER: Final = "planner"
COMPILE_S: Final = 600.0
START_S: Final = 120.0
ONLINE_S: Final = 300.0
LOADED_S: Final = 900.0  # until the first plans are active: weights of a large model take minutes over a slow link
STOP_S: Final = 10.0
LOG_TIME: Final = "%Y-%m-%d %H:%M:%S,%f"
IDLE_BYTES: Final = 256 << 20


class LabSite:
    """Hepti's processes on the hosts of a lab; a context manager: up on entry, everything ended on exit.

    Kernels are compiled at full speed. Then hosts stay throttled, also while weights load: a planner that has measured
    unthrottled hosts plans for faster ones. models: name -> directory. planner: its further options. agents: options of
    each host's agent, by default as in the lab's file. before_start: called while only the broker runs; then entry ends
    after the start of planner and agents, before weights are loaded.
    """

    def __init__(
        self,
        lab: Lab,
        models: Mapping[str, Path],
        planner: Sequence[str] = (),
        agents: Mapping[str, AgentOptions] | None = None,
        site: str = SITE,
        before_start: Callable[[LabSite], object] | None = None,
    ) -> None:
        self._before_start = before_start
        self.started_s = 0.0  #: when the planner and the agents were started, by `time.monotonic`
        self.lab, self.hub, self.models, self.site, self.url = lab, lab.hub, models, site, ""
        self._planner = planner
        self._agents = agents or {
            h.name: AgentOptions(h.name, h.threads, budget(h.memory_bytes)) for h in lab.spec.hosts
        }
        self._running: dict[str, Process] = {}
        self._compiled: dict[str, Path] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self.lab.restart = self.restart
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self.lab.throttle(False)
        self._start_broker()
        self._warm()
        if self._before_start is not None:
            self._before_start(self)
        self.started_s = time.monotonic()
        self._running[PLANNER] = self._start_planner()
        self.lab.throttle(True)
        for alike in self._quotas().values():
            for name in alike:
                self._start_agent(name)
            if self._before_start is not None:
                continue
            self.wait(alike, (), ONLINE_S)  # hosts of one quota measure once; those of another would disturb them
        if self._before_start is not None:
            return
        self.wait(list(self._agents), list(self.models), LOADED_S)

    def wait(self, devices: Sequence[str], models: Sequence[str], timeout_s: float) -> None:
        """Return when the devices are online and every model has a plan; raises LabError naming who is missing."""
        words = [self.hub.python, "-m", "benchmarks.lab.ready", str(timeout_s), ",".join(devices), *models]
        waiting = self.hub.start("ready", words, self.environment(self.hub))
        until = time.monotonic() + timeout_s + START_S
        while waiting.poll() is None and time.monotonic() < until:
            self.check()  # a process that has ended is no reason to wait
            time.sleep(0.1)
        if waiting.poll() != 0:
            raise LabError(f"the site is not ready: {waiting.log().strip() or 'nothing was said'}")

    def talk(self, name: str, module: str) -> Process:
        """Start `python -m MODULE` on the hub, connected to this site by its environment, and speak lines with it."""
        self._running[name] = self.hub.talk(name, module, environment=self.environment(self.hub))
        return self._running[name]

    def environment(self, host: Host) -> dict[str, str]:
        """Return what a program on `host` needs to find the site, and to keep its files in the lab's directory."""
        return {
            "HEPTI_BROKER": self.url,
            "HEPTI_SITE": self.site,
            "XDG_STATE_HOME": str(host.directory / "state"),
            "OPENBLAS_NUM_THREADS": "1",
        }

    def check(self) -> None:
        """Raise LabError with the last words of every process that has ended by itself."""
        ended = [f"{n} ({p.poll()}): {_last(p.log())}" for n, p in self._running.items() if p.poll() is not None]
        if ended:
            raise LabError("ended by itself: " + "; ".join(ended))

    def restart(self, name: str) -> None:
        """Start an agent again, as throttled as its host is; kills it first if it runs."""
        if name not in self._agents:
            raise ConfigError(f"there is no {name!r} on this site; it has {', '.join(self._agents)}")
        if (process := self._running.pop(name, None)) is not None:
            process.signal(signal.SIGKILL)
            process.wait(STOP_S)
        self._start_agent(name)

    def close(self) -> None:
        """End all processes, the broker last; politely where they listen."""
        self.lab.throttle(False)  # a host of a tenth of a core takes its time to say goodbye
        names = sorted(self._running, key=lambda name: name == BROKER)
        for name in names:
            self._running[name].signal(signal.SIGCONT)
            self._running[name].signal(signal.SIGTERM)
        for name in names:
            process = self._running.pop(name)
            try:
                process.wait(STOP_S)
            except LabError:
                process.signal(signal.SIGKILL)

    def online_s(self) -> float:
        """Return after how many seconds the last agent was online; infinity if one was not."""
        begun, found = time.time() - (time.monotonic() - self.started_s), 0.0
        for name in self._agents:
            lines = (line for line in self._running[name].log().splitlines() if " is online at site " in line)
            at = next((datetime.strptime(line[:23], LOG_TIME).timestamp() for line in lines), inf)
            found = max(found, at - begun)
        return found

    def write_logs(self, directory: Path) -> None:
        """Write what each process has logged so far to NAME.log."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, process in self._running.items():
            (directory / f"{name}.log").write_text(process.log())

    # -- parts ------------------------------------------------------------------------------------------------------

    def _quotas(self) -> dict[float | None, list[str]]:
        """Return the names of the hosts by their quota."""
        found: dict[float | None, list[str]] = {}
        for name in self._agents:
            found.setdefault(self.lab.host(name).cpu, []).append(name)
        return found

    def _warm(self) -> None:
        """Compile every kernel, and give the agents of each quota a copy, in which one finds what another measured."""
        done = self.hub.run([self.hub.python, "-m", "benchmarks.lab.probe", "warm"], None, COMPILE_S)
        if done.code:
            raise LabError(f"kernels cannot be compiled: {done.err.strip()}")
        compiled = Path(self.hub.environment["NUMBA_CACHE_DIR"])
        for number, alike in enumerate(self._quotas().values()):
            # Kernels of a forced instruction set come from no directory with another name (`kernels.jit`).
            place = self.lab.directory.resolve() / f"compiled-{self.site}-{number}" / compiled.name
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(compiled, place)
            self._compiled |= dict.fromkeys(alike, place)

    def _start_broker(self) -> None:
        broker = self._running[BROKER] = self.hub.talk(BROKER, "benchmarks.lab.broker", self.hub.address)
        self.url = json.loads(broker.receive(START_S))["url"]

    def _start_planner(self) -> Process:
        models = [word for name, path in self.models.items() for word in ("--model", f"{name}={path.resolve()}")]
        command = [self.hub.python, "-m", "hepti_mqtt.cli", "planner", *self._site_argv(), *models, *self._planner]
        return self.hub.start(PLANNER, command, self.environment(self.hub))

    def _site_argv(self) -> list[str]:
        return ["--broker", self.url, "--site", self.site]

    def _start_agent(self, name: str) -> None:
        host = self.lab.host(name)
        own = {"XDG_CACHE_HOME": str(host.kept), "NUMBA_CACHE_DIR": str(self._compiled[name])}
        program = [host.python, "-m", "hepti_mqtt.cli", "agent", *self._site_argv(), *self._agents[name].to_argv()]
        self._running[name] = host.start(f"agent-{name}", program, {**self.environment(host), **own})


def budget(host_bytes: int | None) -> str | None:
    """Return an agent's budget on a host with a limit: what is left beside its idle process, which takes 200 MB.

    Without it the agent would take 80 % of what the whole machine has free.
    """
    return None if host_bytes is None else str(max(host_bytes - IDLE_BYTES, host_bytes // 2))


def _last(log: str) -> str:
    return " / ".join(log.strip().splitlines()[-5:]) or "it said nothing"
