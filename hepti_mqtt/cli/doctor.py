"""`hepti doctor`: checks of this machine, the broker and the site, with fixes."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from hepti_mqtt import __version__
from hepti_mqtt.cli import output
from hepti_mqtt.config import settings
from hepti_mqtt.core.errors import ConfigError, HeptiError, NetworkError, WireError
from hepti_mqtt.core.ids import is_name

if TYPE_CHECKING:  # imported by the checks that use it: the first line does not wait for NumPy
    from hepti_mqtt.transport.broker_limits import Echo
    from hepti_mqtt.transport.url import BrokerUrl

WANTED_BYTES: Final = (32 << 20) - 1  # MQTT 5 adds a byte
LARGE_BYTES: Final = 1 << 20
ROOM_BYTES: Final = 16  # for a packet's header
NAGLE_S: Final = 0.02  # a small message that takes longer was held back
LOW_MEMORY_BYTES: Final = 256 << 20
PATIENCE_S: Final = 5.0


class Finding(NamedTuple):
    """The result of one check; `advice` is empty where nothing needs fixing."""

    what: str
    found: str
    advice: str = ""
    exit_code: int = 0


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti doctor`."""
    sub.add_argument("--compile", action="store_true", help="also compile the kernels that the cache lacks: minutes")


def doctor(args: argparse.Namespace) -> int:
    """Check the machine, the broker, the site and the kernels; print each finding when its check ends."""
    findings: list[Finding] = []
    if not args.json:
        output.print_lines([f"hepti {__version__}"])
    for finding in _checks(args):
        findings.append(finding)
        if not args.json:
            mark = "!" if finding.advice else " "
            advice = [f"    {'':14} -> {finding.advice}"] if finding.advice else []
            output.print_lines([f"{mark}   {finding.what:14} {finding.found}", *advice])
    code = max((f.exit_code for f in findings), default=0)
    if args.json:
        output.print_json({"ok": code == 0, "findings": [f._asdict() for f in findings]})
    return code


def _checks(args: argparse.Namespace) -> Iterator[Finding]:
    """Yield findings, those of cheap checks first."""
    yield from _machine()
    if args.broker is None:
        _say("looking for a broker in the network")
        yield _found_broker(args)
    if args.broker is not None:
        from hepti_mqtt.transport.url import BrokerUrl

        url = BrokerUrl.parse(args.broker)
        _say(f"asking the broker at {url.place}")
        yield from _broker(url, args.broker, args.site)
    yield _kernels(args.compile)


def _say(what: str) -> None:
    output.err.print(f"... {what}", markup=False)


def _found_broker(args: argparse.Namespace) -> Finding:
    """Look for a broker that the network announces, and take it if there is one alone."""
    from hepti_mqtt.cli.processes import take_found_broker

    try:
        take_found_broker(args)
    except ConfigError as error:
        return Finding("broker", "none given", str(error), 2)
    return Finding("broker", f"{args.broker}, found by mDNS, site {args.site}")


def _machine() -> Iterator[Finding]:
    bits = "64" if sys.maxsize > 2**32 else "32"
    advice = "" if bits == "64" else "use a 64-bit system: there are no wheels for others"
    python = f"Python {platform.python_version()}, {platform.machine()}, {bits} bit"
    yield Finding("machine", f"{python}, {os.cpu_count()} cores", advice, 1 if advice else 0)
    import psutil
    from platformdirs import user_cache_path

    from device_agent.machine import free_memory

    free = free_memory()
    little = "little memory is free for weights; see --memory" if free < LOW_MEMORY_BYTES else ""
    yield Finding("memory", f"{free / 2**20:.0f} MiB free", little)
    yield Finding("examples", str(settings.CONFIG_DIR))
    cache = user_cache_path("hepti")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        room = psutil.disk_usage(str(cache)).free
        yield Finding("tile cache", f"{cache}, {room / 2**30:.1f} GiB free")
    except OSError as exc:
        yield Finding("tile cache", f"{cache}: {exc.strerror}", "name another place with hepti agent --cache DIR", 1)


def _kernels(compiles: bool) -> Finding:
    """Count the compiled kernels; compile the others only if the user says so."""
    from hepti_mqtt.kernels import isa, precompile
    from hepti_mqtt.kernels.jit import cache_directory

    directory = cache_directory()
    if directory is None:
        advice = "each process compiles for itself: set NUMBA_CACHE_DIR to a place to write to"
        return Finding("kernels", f"{isa()}, no place to keep them", advice)
    if compiles:
        view = output.ProgressLines()
        tell = lambda done, total: view.print("kernels", f"compiled {done} of {total}")  # noqa: E731
        precompile.fill_cache("all", tell)
    done, total = precompile.compiled()
    offer = "" if done == total else "an agent compiles the others at its start; now: hepti doctor --compile"
    return Finding("kernels", f"{isa()}, {done} of {total} compiled, kept in {directory}", offer)


def _broker(url: BrokerUrl, text: str, site: str) -> Iterator[Finding]:
    """Look at the broker as the device named like its user would."""
    from hepti_mqtt.protocol.topics import Topics
    from hepti_mqtt.transport.broker_limits import KEPT_MESSAGES, largest_packet, low_queue_warning, queue_capacity

    name = url.user if is_name(url.user) else "doctor"
    topic = Topics(site).probe(name)
    try:
        # First: a broker may drop larger packets silently.
        largest = largest_packet(url, client_id="hepti-doctor-size", topic=topic, wanted_bytes=WANTED_BYTES)
        low = f"set max_packet_size {WANTED_BYTES + 1} (and message_size_limit 0) in the broker's configuration"
        large = min(LARGE_BYTES, largest - len(topic) - ROOM_BYTES)
        small_s, large_s = _echoes(url, topic, large)
        held = "set_tcp_nodelay true in the broker's configuration" if small_s > NAGLE_S else ""
        yield Finding("round trip", f"{small_s * 1e3:.2f} ms, {large / 2**20:.3g} MiB {large_s * 1e3:.1f} ms", held)
        room = queue_capacity(url, client_id="hepti-doctor-room", topic=topic, wanted=KEPT_MESSAGES)
        if room is not None:
            yield Finding("queue", f"{room.queued} messages", low_queue_warning(*room, url.place))
        yield Finding("largest packet", f"{largest} bytes", low if largest < WANTED_BYTES else "")
    except HeptiError as exc:
        yield Finding("broker", f"{url.place}: {exc}", "fix this first", exc.exit_code)
        return
    yield from _site(text, site)


def _echoes(url: BrokerUrl, topic: str, large_bytes: int) -> tuple[float, float]:
    """Return the median seconds of a small and of a large message to the broker and back."""
    from hepti_mqtt.transport.broker_limits import Echo

    echo = Echo(url, "hepti-doctor", topic, PATIENCE_S, until_s=time.monotonic() + 2 * PATIENCE_S)
    try:
        echo.open()
        return _echo_s(echo, 64), _echo_s(echo, large_bytes)
    finally:
        echo.close()


def _echo_s(echo: Echo, size: int) -> float:
    times = []
    for number in range(5):
        payload = bytes([number]) * size
        started = time.perf_counter()
        echo.send(payload)
        while echo.next() != payload:
            pass
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _site(text: str, site: str) -> Iterator[Finding]:
    from hepti_mqtt.client import Hepti

    clocks: Sequence[str] = ()
    try:
        with Hepti.connect(text, site=site) as hepti:
            devices = hepti.devices(wait_s=1.5)
            names = [d["device"] for d in devices if d["status"] == "online"]
            names += [f"{d['device']} ({output.status_text(d)})" for d in devices if d["status"] == "starting"]
            clocks = hepti.odd_clocks(devices)  # also if the planner does not answer
            served = hepti.models(timeout=2.0)
    except (NetworkError, WireError) as exc:
        yield Finding(f"site {site}", str(exc), "start a planner: hepti planner --model NAME=DIR")
    else:
        online = ", ".join(names) or "none"
        advice = "" if names else "start an agent on a device: hepti agent --id NAME"
        yield Finding(f"site {site}", f"models {', '.join(served)}; devices online: {online}", advice)
        for device in devices:
            if device["status"] == "online" and device.get("reason"):
                yield Finding(f"device {device['device']}", str(device["reason"]), "see its agent's log")
    for line in clocks:
        yield Finding("clocks", line, output.CLOCK_ADVICE)
