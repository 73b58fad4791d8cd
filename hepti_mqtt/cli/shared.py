"""What several commands need of a site: its broker, and child processes that end with us."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from hepti_mqtt.cli import output
from hepti_mqtt.config.options import settings_from_args, tcp_port
from hepti_mqtt.config.process import block_signals, exit_on_signals
from hepti_mqtt.core.errors import ConfigError

if TYPE_CHECKING:
    from hepti_mqtt.client import Hepti

CONNECT_S: Final = 10.0  # for one attempt to reach the broker ...
CONNECT_LEAST_S: Final = 1.0  # ... also if less time is left
PLANNER_S: Final = 3.0  # to hear of a planner; its word is retained, so this long only if it is just starting


def add_listener_arguments(sub: argparse.ArgumentParser, port: int, note: str = "") -> None:
    """Add what servers for other programs have: where they listen, and their name at the broker."""
    where = f"address to listen on (default 127.0.0.1{note})"
    sub.add_argument("--bind", metavar="ADDRESS", default="127.0.0.1", help=where)
    sub.add_argument("--port", type=tcp_port, default=port, help=f"port to listen on (default {port})")
    sub.add_argument("--client", metavar="NAME", help="name in topics (default: that of the broker's user)")


def require_broker(args: argparse.Namespace) -> str:
    """Return the broker's URL; raises ConfigError if none was given."""
    return settings_from_args(args).require_broker()


def connect_to_site(args: argparse.Namespace, within_s: float | None = inf) -> Hepti:
    """Return a connection to the site, once a broker answers.

    within_s: seconds to wait for that; None for one attempt. Raises NetworkError if no broker answers.
    """
    from hepti_mqtt.client import Hepti  # here: other commands begin without them
    from hepti_mqtt.transport.base import wait_for_broker

    url = require_broker(args)

    def connect(left_s: float) -> Hepti:
        return Hepti.connect(url, args.site, args.client, min(CONNECT_S, max(left_s, CONNECT_LEAST_S)))

    if within_s is None:
        return connect(CONNECT_S)
    hepti = wait_for_broker(connect, partial(output.err.print, markup=False), within_s=within_s)
    assert hepti is not None  # nothing stops the wait
    return hepti


def only_model(hepti: Hepti) -> str:
    """Return the served model; raises ConfigError if there is none, or several."""
    if len(names := hepti.models(PLANNER_S)) != 1:
        raise ConfigError(f"name a model; the planner serves: {', '.join(names) or 'none'}")
    return names[0]


@contextlib.contextmanager
def check_readable(what: str) -> Iterator[None]:
    """Turn a decoding failure of planner data into an error that says what to do."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        from hepti_mqtt.protocol.messages import unreadable  # here: help needs no NumPy

        raise unreadable(f"{what} cannot be read here ({error!r})") from error


class AgentOptions(NamedTuple):
    """An agent to start as a child; memory: as people write it, such as 400MiB, None for the agent's default."""

    device: str
    threads: int
    memory: str | None = None

    def to_argv(self) -> list[str]:
        """Return the arguments that say the same."""
        memory = [] if self.memory is None else ["--memory", self.memory]
        return ["--id", self.device, "--threads", str(self.threads), *memory]


class ChildProcesses:
    """Child processes of a command; all of them end with the `with` block, also after a failure or a signal."""

    def __init__(self, log: IO[bytes] | None = None) -> None:
        self._log = log
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Start `python -m hepti_mqtt.cli ARGUMENTS`."""
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", "hepti_mqtt.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log or subprocess.DEVNULL,
            stderr=self._log or subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )

    def dead(self) -> dict[str, int]:
        """Return the exit codes of children that have ended by themselves."""
        return {n: p.returncode for n, p in self.running.items() if p.poll() is not None}

    def close(self) -> None:
        """End all children: politely, then by force."""
        with block_signals():
            for process in self.running.values():
                if process.poll() is None:
                    process.terminate()
            for process in self.running.values():
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self.running.clear()


@contextlib.contextmanager
def child_processes(log_file: Path | None = None) -> Iterator[ChildProcesses]:
    """Yield child processes that write to `log_file`."""
    with exit_on_signals(), contextlib.ExitStack() as stack:
        log = stack.enter_context(log_file.open("wb")) if log_file else None
        children = ChildProcesses(log)
        stack.callback(children.close)
        yield children
