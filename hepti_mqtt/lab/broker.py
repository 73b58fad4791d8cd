"""`python -m hepti_mqtt.lab.broker ADDRESS PORT`: a broker of a lab, without password; prints its URL as JSON.

PORT 0 takes a free one. It ends with this process, also when that is killed: a moment later, so whoever starts another
one on its port waits for that.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Final

from hepti_mqtt.config.process import stop_event
from hepti_mqtt.embedded_broker import EmbeddedBroker, start_broker
from hepti_mqtt.errors import ConfigError, HeptiError

PATIENCE_S: Final = 10.0  # for a port that is taken


def started(address: str, port: int) -> EmbeddedBroker:
    """Return a running broker; raises ConfigError if its port stays taken."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return start_broker(address=address, port=port)
        except ConfigError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def main(arguments: Sequence[str]) -> int:
    """Run a broker until SIGTERM, SIGINT or SIGHUP; return the exit code."""
    stop = stop_event()
    try:
        address, port = arguments[0], int(arguments[1])
    except (IndexError, ValueError):
        print("usage: python -m hepti_mqtt.lab.broker ADDRESS PORT", file=sys.stderr)
        return 2
    try:
        with started(address, port) as broker:
            print(json.dumps({"url": broker.url, "kind": broker.kind, "reason": broker.reason}), flush=True)
            broker.serve(stop)
    except HeptiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
