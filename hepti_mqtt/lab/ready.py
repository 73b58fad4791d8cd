"""`python -m hepti_mqtt.lab.ready TIMEOUT_S DEVICE,DEVICE MODEL...`: wait until a site can be measured; prints JSON.

The devices are online and every model has an active plan. The broker and the site are those of HEPTI_BROKER and
HEPTI_SITE. Runs on the lab's own hosts, since the broker may not be reachable from elsewhere.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from hepti_mqtt.client import Hepti
from hepti_mqtt.errors import HeptiError, NetworkError


def wait(hepti: Hepti, devices: frozenset[str], models: Sequence[str], timeout_s: float) -> dict[str, object]:
    """Return what the devices say of themselves, once all are online and every model has a plan.

    Raises NetworkError that names the devices that are missing, or what `Hepti.wait_ready` raises.
    """
    until = time.monotonic() + timeout_s
    while True:
        said = hepti.devices()
        missing = devices - {d["device"] for d in said if d["status"] == "online"}
        if not missing:
            break
        if time.monotonic() > until:
            raise NetworkError(f"not online after {timeout_s:g} s: {', '.join(sorted(missing))}; look at their logs")
    plans = {model: hepti.wait_ready(model, max(until - time.monotonic(), 1.0)) for model in models}
    return {"devices": said, "plans": plans}


def main(arguments: Sequence[str]) -> int:
    """Wait and print; return the exit code."""
    timeout_s, devices, models = float(arguments[0]), arguments[1], arguments[2:]
    try:
        with Hepti.connect(timeout=timeout_s) as hepti:
            print(json.dumps(wait(hepti, frozenset(filter(None, devices.split(","))), models, timeout_s)), flush=True)
    except HeptiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
