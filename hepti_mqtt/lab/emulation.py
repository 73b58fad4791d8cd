"""Everything that an emulated lab makes on this machine: namespaces, control groups, sleepers, its record."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from hepti_mqtt.errors import LabError
from hepti_mqtt.lab import cgroups, leftovers, network, sleeper
from hepti_mqtt.lab.emulated import EmulatedHost
from hepti_mqtt.lab.spec import HELD_TO, HUB, LabSpec


class Emulation:
    """Namespaces, groups and sleepers of an emulated lab."""

    def __init__(self, spec: LabSpec, directory: Path, kept: Path, keep: bool) -> None:
        _check_machine()
        self._spec, self._keep, self._directory, self._kept = spec, keep, directory, kept
        controllers = cgroups.this_machine()
        self._cpu_root = controllers.cpu_root
        names = [HUB, *(host.name for host in spec.hosts)]
        limits = {host.name: host.memory_bytes for host in spec.hosts}
        rates = {name: spec.slowed(spec.rate_of(name)) for name in names}
        speeds = {host.name: spec.slowed(host.gflops) for host in spec.hosts}
        self.network = network.Network(spec.name, rates)
        self._groups = {name: cgroups.Group(controllers, spec.name, name, limits.get(name)) for name in names}
        self.hosts: dict[str, EmulatedHost] = {}
        self._sleepers: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._full: dict[str, float] = {}
        self._record = leftovers.Record(
            spec.name,
            leftovers.me(),
            False,
            str(directory.resolve()),
            self.network.namespaces,
            [str(path) for group in self._groups.values() for path in group.directories],
            {
                name: {
                    "address": self.network.addresses[name],
                    "rate_mbit": rates[name],
                    "gflops": speeds.get(name),
                    "cpu": None,
                    "group": str(self._groups[name].directories[-1]),
                }
                for name in names
            },
        )

    def claim(self) -> None:
        """Write down what will be made; raises LabError, with nothing made, if the name or a namespace is taken."""
        taken = set(network.namespaces()) & set(self.network.namespaces)
        leftovers.claim(self._record)
        if taken:
            (leftovers.STATES / f"{self._spec.name}.json").unlink()
            raise LabError(
                f"namespace {min(taken)} is there already, and no lab of this name is; see `hepti lab status`, remove "
                "leftovers with `hepti lab down --all`, or give the lab another name"
            )

    def make(self) -> None:
        """Make everything."""
        self.network.make()
        targets = {host.name: host.gflops for host in self._spec.hosts}
        environment: dict[str, str] = {}
        if isa := self._spec.isa:
            # Code for a set that is forced is kept in a place of its own, and compiled once for all hosts.
            environment = {**HELD_TO[isa], "NUMBA_CACHE_DIR": str(self._kept.resolve() / "compiled" / isa)}
        for name, group in self._groups.items():
            group.make()
            place = self._directory.resolve() / name
            place.mkdir(parents=True, exist_ok=True)
            namespace = network.namespace(self._spec.name, name)
            address = self.network.addresses[name]
            kept = self._kept.resolve() / name
            host = EmulatedHost(name, address, namespace, group, place, kept, self._start_sleepers, targets.get(name))
            host.environment |= environment
            self.hosts[name] = host
        self.hosts[HUB].set_cpu(self._spec.hub_cpu)

    def calibrated(self, host: EmulatedHost) -> float:
        """Return the quota from which changes scale: the one that the host had before its first change."""
        if host.name not in self._full:
            if host.cpu is None and host.gflops is not None:
                raise LabError(f"host {host.name} has no quota yet; calibrate the lab before its CPU is changed")
            self._full[host.name] = host.cpu if host.cpu is not None else float(len(os.sched_getaffinity(0)))
        return self._full[host.name]

    def leave(self) -> None:
        """Write down that the lab is up on purpose, with its quotas."""
        with self._lock:
            self._record.kept = True
            for name, host in self.hosts.items():
                self._record.hosts[name]["cpu"] = host.cpu
            leftovers.update(self._record)

    def close(self) -> None:
        """End and remove everything."""
        for host in self.hosts.values():
            host.close()
        with self._lock:
            for process in self._sleepers:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
            self._sleepers.clear()
        leftovers.remove(self._record)

    def _start_sleepers(self) -> None:
        """Start a real-time sleeper on every core that the lab may use, once a quota is in force."""
        with self._lock:
            if self._sleepers:
                return
            parent = 0 if self._keep else os.getpid()
            for core in sorted(os.sched_getaffinity(0)):
                # Where real-time time is given out by group, only the top group has any.
                enter = f'echo $$ > "{self._cpu_root}/cgroup.procs" && exec "$@"'
                program = [sys.executable, "-I", "-S", sleeper.__file__, str(core), str(parent)]
                process = subprocess.Popen(
                    ["sh", "-c", enter, "hepti-lab", *program],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                self._sleepers.append(process)
            for process in self._sleepers:
                assert process.stdout is not None
                if process.stdout.readline() != b"ready\n":
                    raise LabError(
                        "the real-time sleeper that makes quotas exact cannot be started; emulated hosts need the "
                        "right to SCHED_FIFO (root with CAP_SYS_NICE, and real-time time in the top CPU group)"
                    )
                start = leftovers.started(process.pid)
                if start is not None:
                    self._record.sleepers.append((process.pid, start))
            leftovers.update(self._record)


def _check_machine() -> None:
    if not sys.platform.startswith("linux"):
        raise LabError("emulated hosts need Linux; use a lab of kind local or ssh")
    if missing := network.missing_tools():
        raise LabError(f"emulated hosts need {', '.join(missing)}; install them (Debian: apt install iproute2)")
    if os.geteuid() != 0:
        raise LabError("emulated hosts need root: run the command with sudo, or use a lab of kind local or ssh")
