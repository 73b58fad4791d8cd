"""`python -m hepti_mqtt.lab.broker ADDRESS PORT`: a broker of a lab, without password; prints its URL as JSON.

PORT 0 takes a free one. It ends with this process, also when that is killed.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Sequence

from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.errors import HeptiError


def main(arguments: Sequence[str]) -> int:
    """Run a broker until SIGTERM or SIGINT; return the exit code."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        address, port = arguments[0], int(arguments[1])
    except (IndexError, ValueError):
        print("usage: python -m hepti_mqtt.lab.broker ADDRESS PORT", file=sys.stderr)
        return 2
    try:
        with start_broker(address=address, port=port) as broker:
            print(json.dumps({"url": broker.url, "kind": broker.kind, "reason": broker.reason}), flush=True)
            stop.wait()
    except HeptiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
