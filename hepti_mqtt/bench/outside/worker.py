"""`python -m hepti_mqtt.bench.outside.worker ADDRESS`: an outside baseline's process on a host; speaks JSON lines.

stdin: {"do": "port"}, {"do": "load", "module", "variant", "packed", "rank", "world", "master", "model", "body",
"reference" (a .npy, null on all ranks but the first)}, {"do": "check"}, {"do": "measure"}, {"do": "drop"}. stdout: one
line for each, {"ok": true, ...} or {"ok": false, "code", "message"}. Between two lines it waits in a read and takes no
time of its host. ADDRESS: the host's, by which gloo finds the network interface.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil

from hepti_mqtt.bench.accuracy import relative_error
from hepti_mqtt.bench.outside import common
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import HeptiError


class Worker:
    """At most one baseline with its weights; the library stays imported between two of them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._made: common.Made
        self._expected: common.Array | None = None

    def port(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Return a free port of this host."""
        with socket.create_server((self._address, 0)) as server:
            return {"port": server.getsockname()[1]}

    def load(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Read the weights and join the group; raises ConfigError for a missing package."""
        module = importlib.import_module(f"hepti_mqtt.bench.outside.{order['module']}")
        options = common.Options(order["rank"], order["world"], order["master"], order["variant"], order["packed"])
        with Checkpoint.open(order["model"]) as checkpoint:
            self._made = module.make(options, common.task(checkpoint, order["body"]))
        self._expected = None if order["reference"] is None else np.load(order["reference"])
        return {"versions": self._made.versions}

    def check(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Compute once; return the relative error of the hidden states where there is a reference, and memory held."""
        found, expected = self._made.compute(), self._expected
        error = None if found is None or expected is None else relative_error(found, expected)
        return {"error": error, "rss_bytes": psutil.Process().memory_info().rss}

    def measure(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Compute once and return how long it took, from the moment at which all ranks stand ready."""
        self._made.together()
        begin = time.perf_counter()
        self._made.compute()
        return {"latency_ms": 1e3 * (time.perf_counter() - begin)}

    def drop(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Leave the group and free the weights."""
        self._made.leave()
        del self._made
        gc.collect()
        return {}


def interface(address: str) -> str | None:
    """Return the network interface that has an address of this host, None for an address that it does not know."""
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found for a in own if a.address == address), None)


def main() -> int:
    """Answer every line of stdin until it ends."""
    address = sys.argv[1]
    if (name := interface(address)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name  # gloo would take the one that the host's name resolves to
    worker = Worker(address)
    actions = {
        **{"port": worker.port, "load": worker.load, "check": worker.check},
        **{"measure": worker.measure, "drop": worker.drop},
    }
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"ok": True, **actions[order["do"]](order)}
        except HeptiError as error:
            answer = {"ok": False, "code": error.code, "message": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
