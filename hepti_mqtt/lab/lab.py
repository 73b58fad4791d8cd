"""A lab from its opening to its end: every host of a file, whatever kind they are."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hepti_mqtt.config.process import ended_by_signals, uninterrupted
from hepti_mqtt.errors import LabError
from hepti_mqtt.lab.changes import Change
from hepti_mqtt.lab.emulated import EmulatedHost
from hepti_mqtt.lab.emulation import Emulation
from hepti_mqtt.lab.hosts import Host
from hepti_mqtt.lab.local import LocalHost
from hepti_mqtt.lab.spec import HUB, HostSpec, LabSpec


class Lab:
    """The hosts of a lab file; a context manager: made on entry, everything ended and removed on exit.

    directory: of logs and of what hosts keep; it stays. kept: of what a later lab on the same hosts may use again, such
    as tiles of weights; boards keep it themselves. keep: an emulated lab may outlive this process, see `leave`.
    hosts: the agents' hosts by name. hub: the host of clients, and of broker and planner unless the file names others.
    restart: what the change `restart` does to a host; a site sets its own.
    """

    def __init__(self, spec: LabSpec, directory: Path, *, keep: bool = False, kept: Path | None = None) -> None:
        self.spec, self.directory, self._keep, self._kept = spec, directory, keep, kept or directory / "kept"
        self.hosts: Mapping[str, Host] = {}
        self.hub: Host
        self.restart: Callable[[str], None] = lambda name: self.host(name).restart()
        self._backing: Emulation | None = None
        self._closers: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._signals = ExitStack()

    @property
    def broker_host(self) -> Host:
        """Return where the broker runs."""
        return self.host(self.spec.broker or HUB)

    @property
    def planner_host(self) -> Host:
        """Return where the planner runs."""
        return self.host(self.spec.planner or self.spec.broker or HUB)

    def host(self, name: str) -> Host:
        """Return the host of a name, the hub included; raises ConfigError that lists the names."""
        if name == HUB:
            return self.hub
        return self.hosts[self.spec.host(name).name]

    def open(self) -> None:
        """Make the lab; raises LabError, with nothing left behind."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._signals.enter_context(ended_by_signals())
        atexit.register(self.close)
        try:
            _MAKERS[self.spec.kind](self)
        except BaseException:
            self.close()
            raise

    def apply(self, change: Change) -> None:
        """Change the lab now; raises LabError if the host or the lab cannot do it."""
        with self._lock:
            _ACTIONS[change.do](self, change)

    def entering(self, name: str, words: Sequence[str]) -> list[str] | None:
        """Return the command here that runs `words` on a host; None where only `Host.start` can, with changes."""
        host = self.host(name)
        if isinstance(host, EmulatedHost):
            return host.entering(words)
        return list(words) if host is self.hub else None

    def leave(self) -> None:
        """Leave an emulated lab up, for `hepti lab down` to remove; made with `keep`."""
        self._emulation().leave()
        self._closers.clear()
        self.close()

    def close(self) -> None:
        """End every process and remove everything that was made; a second call does nothing."""
        with self._lock, uninterrupted():
            try:
                while self._closers:
                    self._closers.pop()()
            finally:
                atexit.unregister(self.close)
                self._signals.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- kinds ------------------------------------------------------------------------------------------------------

    def _make_emulated(self) -> None:
        backing = Emulation(self.spec, self.directory, self._kept, self._keep)
        backing.claim()
        self._closers.append(backing.close)
        backing.make()
        self._backing = backing
        self.hub = backing.hosts[HUB]
        self.hosts = {name: host for name, host in backing.hosts.items() if name != HUB}

    def _make_local(self) -> None:
        self._make_local_hub()
        hosts: dict[str, Host] = {}
        for host in self.spec.hosts:
            python, kept = host.python or sys.executable, self._kept / host.name
            made = LocalHost(host.name, self.directory / host.name, python, kept=kept)
            self._closers.append(made.close)
            hosts[host.name] = made
        self.hosts = hosts

    def _make_ssh(self) -> None:
        from hepti_mqtt.lab.ssh import SshHost

        self._make_local_hub()
        hosts: dict[str, Host] = {}
        for host in self.spec.hosts:
            command, address = transport(host)
            place = f".cache/hepti/lab/{self.spec.name}/{host.name}"  # below the home directory, where ssh begins
            logs = self.directory / host.name
            made = SshHost(host.name, address, command, logs, python=host.python or "python3", directory=place)
            self._closers.append(made.close)
            hosts[host.name] = made
        self.hosts = hosts

    def _make_local_hub(self) -> None:
        hub = LocalHost(HUB, self.directory / HUB)
        hub.address = self.spec.address or hub.address
        self._closers.append(hub.close)
        self.hub = hub

    # -- changes ----------------------------------------------------------------------------------------------------

    def _emulated(self, name: str) -> EmulatedHost:
        return self._emulation().hosts[name]

    def _emulation(self) -> Emulation:
        if self._backing is None:
            raise LabError(
                f"lab {self.spec.name} is of kind {self.spec.kind}; only emulated links and quotas can be changed"
            )
        return self._backing

    def _set_cpu(self, change: Change) -> None:
        """Scale the quota: by `share` of the calibrated one, or by `gflops` over the host's target."""
        host = self._emulated(change.host)
        full = self._emulation().calibrated(host)
        if change.gflops is not None:
            assert host.gflops is not None, "checked with the script"
            host.set_cpu(full * change.gflops / host.gflops)
        else:
            assert change.share is not None, "checked with the script"
            host.set_cpu(full * change.share)
        host.throttle(True)

    def _set_rate(self, change: Change) -> None:
        assert change.mbit is not None, "checked with the script"
        self._emulation().network.set_rate(change.host, change.mbit / self.spec.dilation)


def transport(host: HostSpec) -> tuple[list[str], str]:
    """Return the program that carries commands to a board, and where the other hosts reach the board."""
    login, _, port = (host.ssh or "").partition(":")
    address = login.rpartition("@")[2] or "127.0.0.1"
    return list(host.command) or ["ssh", *(["-p", port] if port else []), login], address


_MAKERS: Final[Mapping[str, Callable[[Lab], None]]] = {
    "emulated": Lab._make_emulated,
    "local": Lab._make_local,
    "ssh": Lab._make_ssh,
}
_ACTIONS: Final[Mapping[str, Callable[[Lab, Change], None]]] = {
    "rate": Lab._set_rate,
    "cpu": Lab._set_cpu,
    "cut": lambda lab, change: lab._emulation().network.cut(change.host),
    "mend": lambda lab, change: lab._emulation().network.mend(change.host),
    "kill": lambda lab, change: lab.host(change.host).kill(),
    "restart": lambda lab, change: lab.restart(change.host),
    "stop": lambda lab, change: lab.host(change.host).signal(signal.SIGSTOP),
    "cont": lambda lab, change: lab.host(change.host).signal(signal.SIGCONT),
}
