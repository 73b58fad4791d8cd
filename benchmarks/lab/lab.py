"""A lab from its opening to its end: namespaces, groups and sleepers of its hosts, and changes to them.

Who uses a lab has locked `/run/hepti-lab/LAB.lock`, in which its namespaces are written before they are made. What is
written there without a lock is left over, and the next one removes it, with the control groups `hepti/LAB`.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final, Self

from benchmarks.errors import LabError
from benchmarks.files import ROOT
from benchmarks.lab import cgroups, network, sleeper
from benchmarks.lab.changes import Change
from benchmarks.lab.hosts import Host, send_signal
from benchmarks.lab.spec import HELD_TO, HUB, LabSpec
from hepti_mqtt.config.process import block_signals, exit_on_signals

LOCKS: Final = Path("/run/hepti-lab")
COMPILED: Final = ROOT / ".cache" / "lab-compiled"  # kernels, for the hosts of all labs: an agent has a copy


class Lab:
    """The hosts of a lab file; a context manager: made on entry, everything ended and removed on exit.

    directory: of logs and of what hosts keep; it stays. kept: of what a later lab on the same hosts may use again, such
    as tiles of weights. hosts: the agents' hosts by name. hub: the host of broker, planner and clients. restart: what
    the change `restart` does to a host; a site sets it.
    """

    def __init__(self, spec: LabSpec, directory: Path, kept: Path | None = None) -> None:
        self.spec, self.directory, self._kept = spec, directory, kept or directory / "kept"
        self.hosts: dict[str, Host] = {}
        self.hub: Host
        self.restart: Callable[[str], None] = self._nothing_to_restart
        self._network: network.Network | None = None
        self._sleepers: list[subprocess.Popen[bytes]] = []
        self._full: dict[str, float] = {}
        self._lock = threading.RLock()
        self._stack = ExitStack()

    def host(self, name: str) -> Host:
        """Return the host of a name, the hub included; raises ConfigError that lists the names."""
        return self.hub if name == HUB else self.hosts[self.spec.host(name).name]

    def throttle(self, on: bool) -> None:
        """Turn all quotas on or off: programs start and weights are loaded without, requests run with them."""
        for host in (self.hub, *self.hosts.values()):
            host.throttle(on)

    def apply(self, change: Change) -> None:
        """Change the lab now; raises LabError if the host or the lab cannot do it."""
        with self._lock:
            _ACTIONS[change.do](self, change)

    def set_rate(self, name: str, rate_mbit: float) -> None:
        """Give a host's link another rate, as the lab file would say it."""
        self._links().set_rate(name, rate_mbit / self.spec.dilation)

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(exit_on_signals())
        atexit.register(self.close)
        try:
            self._make_emulated() if self.spec.kind == "emulated" else self._make_local()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove everything that was made; a second call does nothing."""
        with self._lock, block_signals():
            for host in (*self.hosts.values(), *([self.hub] if hasattr(self, "hub") else [])):
                host.close()
            for process in self._sleepers:
                process.kill()
                process.communicate()
            self._sleepers.clear()
            self._stack.close()
            atexit.unregister(self.close)

    def _make_local(self) -> None:
        for name in (HUB, *(host.name for host in self.spec.hosts)):
            self._add(Host(name, "127.0.0.1", self.directory / name, self._kept / name, self._environment()))

    def _make_emulated(self) -> None:
        spec = self.spec
        if missing := _why_not():
            raise LabError(f"emulated hosts need {missing}; or use a lab of kind local")
        controllers = cgroups.this_machine()
        names = [HUB, *(host.name for host in spec.hosts)]
        self._network = network.Network(spec.name, {name: spec.rate_of(name) for name in names})
        self._stack.enter_context(_claimed(spec.name, self._network.namespaces))
        self._network.make()
        for name, own in zip(names, (None, *spec.hosts), strict=True):
            group = cgroups.Group(controllers, spec.name, name, own.memory_bytes if own else None)
            group.make()
            host = Host(
                name,
                self._network.addresses[name],
                self.directory / name,
                self._kept / name,
                self._environment(),
                namespace=network.namespace(spec.name, name),
                group=group,
                gflops=own.gflops if own else None,
                before_throttle=self._start_sleepers,
            )
            self._add(host)
        self.hub.set_cpu(spec.hub_cpu)

    def _environment(self) -> Mapping[str, str]:
        isa = self.spec.isa
        return {**(HELD_TO[isa] if isa else {}), "NUMBA_CACHE_DIR": str(COMPILED / (isa or "native"))}

    def _add(self, host: Host) -> None:
        if host.name == HUB:
            self.hub = host
        else:
            self.hosts[host.name] = host

    def _start_sleepers(self) -> None:
        """Start a real-time sleeper on every core that the lab may use, once a quota is in force."""
        with self._lock:
            if self._sleepers:
                return
            # Where real-time time is given out by group, only the top group has any.
            enter = f'echo $$ > "{cgroups.this_machine().cpu}/cgroup.procs" && exec "$@"'
            for core in sorted(os.sched_getaffinity(0)):
                program = [sys.executable, "-I", "-S", sleeper.__file__, str(core), str(os.getpid())]
                words = ["sh", "-c", enter, "hepti-lab", *program]
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
                )
                self._sleepers.append(process)
            for process in self._sleepers:
                assert process.stdout is not None
                if process.stdout.readline() != b"ready\n":
                    raise LabError(
                        "the real-time sleeper that makes quotas exact cannot be started; emulated hosts need the "
                        "right to SCHED_FIFO (root with CAP_SYS_NICE, and real-time time in the top CPU group)"
                    )

    def _links(self) -> network.Network:
        if self._network is None:
            raise LabError(f"lab {self.spec.name} is of kind {self.spec.kind}: only emulated links can be changed")
        return self._network

    def _set_cpu(self, change: Change) -> None:
        """Scale the quota: by `share` of the one before the first change, or by `gflops` over the host's target."""
        host = self.host(change.host)
        full = self._full.setdefault(host.name, host.cpu or float(len(os.sched_getaffinity(0))))
        share = change.share if change.gflops is None else change.gflops / (host.gflops or 1.0)
        assert share is not None, "checked with the script"
        host.set_cpu(full * share)
        host.throttle(True)

    def _nothing_to_restart(self, name: str) -> None:
        raise LabError(f"no site runs on {name}, so that there is nothing to restart")


_ACTIONS: Final[Mapping[str, Callable[[Lab, Change], None]]] = {
    "rate": lambda lab, change: lab.set_rate(change.host, change.mbit or 0.0),
    "cpu": Lab._set_cpu,
    "cut": lambda lab, change: lab._links().plug(change.host, "down"),
    "reconnect": lambda lab, change: lab._links().plug(change.host, "up"),
    "kill": lambda lab, change: lab.host(change.host).kill(),
    "restart": lambda lab, change: lab.restart(change.host),
    "stop": lambda lab, change: lab.host(change.host).signal(signal.SIGSTOP),
    "cont": lambda lab, change: lab.host(change.host).signal(signal.SIGCONT),
}


def leftovers() -> list[str]:
    """Return the names of labs of which something is there and that nobody uses."""
    found = []
    for path in sorted(LOCKS.glob("*.lock")):
        if path.stat().st_size and (lock := _locked(path.stem)) is not None:
            lock.close()
            found.append(path.stem)
    return found


def remove(lab: str) -> None:
    """End everything that runs in a lab and remove all that was made for it; what is gone already is no error."""
    controllers = cgroups.this_machine()
    for top in {controllers.cpu, controllers.memory or controllers.cpu}:
        cgroups.remove(sorted((top / cgroups.TOP / lab).glob("*/")), lambda pid: send_signal(pid, signal.SIGKILL))
    written = LOCKS / f"{lab}.lock"
    names = written.read_text().split()
    for name in names:
        for pid in network.processes(name):
            send_signal(pid, signal.SIGKILL)
    network.remove(names)
    written.write_text("")


@contextmanager
def _claimed(lab: str, namespaces: Sequence[str]) -> Iterator[None]:
    """Use a lab's name: what is left over of it goes first, and what was made of it in the end."""
    lock = _locked(lab)
    if lock is None:
        raise LabError(f"lab {lab} is in use by another process; wait for it, or give this one another name")
    with lock:
        remove(lab)
        (LOCKS / f"{lab}.lock").write_text("\n".join(namespaces))
        try:
            yield
        finally:
            remove(lab)


def _locked(lab: str) -> IO[bytes] | None:
    try:
        LOCKS.mkdir(parents=True, exist_ok=True)
        lock = (LOCKS / f"{lab}.lock").open("ab")
    except OSError as error:
        raise LabError(f"{LOCKS} cannot be written: {error.strerror}; emulated hosts need root (sudo)") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _why_not() -> str:
    if not sys.platform.startswith("linux"):
        return "Linux"
    missing = ", ".join(network.missing_tools())
    return f"{missing} (Debian: apt install iproute2)" if missing else "root (sudo)" if os.geteuid() else ""
