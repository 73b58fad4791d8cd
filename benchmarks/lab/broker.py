"""`python -m benchmarks.lab.broker ADDRESS`: a broker of a lab, without password; prints its URL as JSON.

It takes a free port, and ends with this process.
"""

from __future__ import annotations

import json
import sys

from hepti_mqtt.config.process import stop_event
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.embedded_broker import start_broker


def main(address: str) -> int:
    """Run a broker until SIGTERM, SIGINT or SIGHUP; return the exit code."""
    stop = stop_event()
    try:
        with start_broker(address=address, port=0) as broker:
            print(json.dumps({"url": broker.url, "kind": broker.kind}), flush=True)
            broker.serve(stop)
    except HeptiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
