"""`python -m benchmarks.lab.ready TIMEOUT_S DEVICE,DEVICE MODEL...`: wait until a site can be measured.

The devices are online and every model has an active plan. The broker and the site are those of HEPTI_BROKER and
HEPTI_SITE. Runs on the lab's own hosts, since the broker may not be reachable from elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import HeptiError, NetworkError


def main(arguments: Sequence[str]) -> int:
    """Wait; return the exit code."""
    timeout_s, devices, models = float(arguments[0]), set(filter(None, arguments[1].split(","))), arguments[2:]
    until = time.monotonic() + timeout_s
    try:
        with Hepti.connect(timeout=timeout_s) as hepti:
            while missing := devices - {d["device"] for d in hepti.devices() if d["status"] == "online"}:
                if time.monotonic() > until:
                    raise NetworkError(f"not online after {timeout_s:g} s: {', '.join(sorted(missing))}")
            for model in models:
                hepti.wait_ready(model, max(until - time.monotonic(), 1.0))
    except HeptiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
