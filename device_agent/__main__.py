"""`python -m device_agent`: an agent without the rest of the command line."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from device_agent.agent import CACHE_BYTES, AgentConfig, run_agent
from hepti_mqtt.errors import ConfigError, HeptiError
from hepti_mqtt.transport import BrokerUrl

_UNITS: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 200MiB, 1.5GB or 4096; raises ConfigError."""
    found = _SIZE.fullmatch(text.strip())
    unit = found and _UNITS.get(found[2].lower())
    if not found or unit is None:
        raise ConfigError(f"{text!r} is no size; write a number with KiB, MiB, GiB, KB, MB or GB, such as 200MiB")
    return int(float(found[1]) * unit)


def _hold() -> None:
    """Say that everything is compiled and wait for a line: a lab slows the host down before it measures itself."""
    print("compiled", flush=True)
    if not sys.stdin.readline():
        raise ConfigError("--hold waits for a line on stdin, which is closed; start the agent without it")


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent; return the exit code of DESIGN's table: 0, or that of the error."""
    parser = argparse.ArgumentParser(prog="python -m device_agent", description=__doc__)
    parser.add_argument("--broker", required=True, help="mqtt[s]://user:password@host:port")
    parser.add_argument("--site", default="home")
    parser.add_argument("--id", required=True, help="name of this device")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--memory", help="budget for weights and live values, such as 200MiB")
    parser.add_argument("--cache", type=Path, help="directory for all that the device keeps")
    parser.add_argument("--cache-size", default=str(CACHE_BYTES), help="limit of the tile cache; 0 for none")
    parser.add_argument("--hold", action="store_true", help="print `compiled`, and measure after a line on stdin")
    parser.add_argument("--no-retry", action="store_true", help="end if the broker is not there")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = AgentConfig(
            url=BrokerUrl.parse(given.broker),
            site=given.site,
            device_id=given.id,
            threads=given.threads,
            memory_bytes=None if given.memory is None else parse_bytes(given.memory),
            cache_dir=given.cache,
            cache_bytes=parse_bytes(given.cache_size),
            retry=not given.no_retry,
            hold=_hold if given.hold else None,
        )
        run_agent(config)
    except HeptiError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
