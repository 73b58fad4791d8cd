"""One process of the transport experiment: `python -m benchmarks.transport_host`, driven by lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from benchmarks.transport_ways import HEADER, WAYS, Array, Raw, Way
from hepti_mqtt.core.errors import HeptiError

_SWITCH_S: Final = 0.0005  # as agents have it: what hears must not wait for what computes


class Rank:
    """What one process does in each kind of case; ranks 0 and 1 are the pair where there is one."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._early: Counter[int] = Counter()

    def round_trip(self, way: Way, body: Array, repeat: int) -> list[float]:
        """Return the seconds of each; rank 1 answers."""
        times: list[float] = []
        for _ in range(repeat if self.rank < 2 else 0):
            start = time.perf_counter()
            if self.rank == 0:
                way.send(body, 1)
                way.receive()
            else:
                way.receive()
                way.send(body, 0)
            times.append(time.perf_counter() - start)
        return times

    def one_way(self, way: Way, body: Array, repeat: int) -> list[float]:
        """Send all from rank 0 to rank 1; return when this began or ended, on the machine's clock."""
        start = time.monotonic()
        if self.rank == 0:
            for _ in range(repeat):
                way.send(body, 1)
            return [start]
        for _ in range(repeat if self.rank == 1 else 0):
            way.receive()
        return [time.monotonic()]

    def all_gather(self, way: Way, body: Array, repeat: int) -> list[float]:
        """Send to all and wait for all, again and again; return the mean seconds of one."""
        start = time.perf_counter()
        if way.gather(body, self.count, repeat):
            return [(time.perf_counter() - start) / repeat]
        for _ in range(repeat):
            way.send(body, None)
            missing = set(range(self.count)) - {self.rank}
            for source in list(missing):
                if self._early[source]:  # the quicker one has sent its next already
                    self._early[source] -= 1
                    missing.discard(source)
            while missing:
                source = way.receive()
                if source in missing:
                    missing.discard(source)
                else:
                    self._early[source] += 1
        return [(time.perf_counter() - start) / repeat]


KINDS: Final[dict[str, Callable[[Rank, Way, Array, int], list[float]]]] = {
    "round trip": Rank.round_trip,
    "one way": Rank.one_way,
    "all-gather": Rank.all_gather,
}


def measure(rank: Rank, way: Way, case: dict[str, Any]) -> dict[str, Any]:
    """Return the CPU time per repetition until everybody has finished; the times are told before that."""
    body = np.zeros(case["bytes"] - (0 if isinstance(way, Raw) else len(HEADER)), np.uint8)
    way.expect(case["bytes"])
    _say({"ready": True})
    _hear()
    cpu = time.process_time()
    times = KINDS[case["kind"]](rank, way, body, case["repeat"])
    way.flush()
    _say({"times": times})
    _hear()  # network threads may be at it still
    return {"cpu_s": (time.process_time() - cpu) / case["repeat"]}


def main() -> None:
    """Serve until standard input ends."""
    sys.setswitchinterval(_SWITCH_S)
    spec = _hear()
    addresses = spec["addresses"]
    rank = Rank(spec["rank"], len(addresses))
    ways = {name: WAYS[name](spec["rank"], spec["largest"], spec["broker"], addresses) for name in spec["ways"]}
    try:
        _say({name: way.port for name, way in ways.items()})
        ports = _hear()["ports"]
        for name, way in ways.items():
            way.connect([there[name] for there in ports])
        _say({"up": True})
        while case := _hear():
            _say(measure(rank, ways[case["way"]], case))
    except HeptiError as error:
        _say({"error": str(error)})
    finally:
        for way in ways.values():
            way.close()


def _say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


def _hear() -> dict[str, Any]:
    line = sys.stdin.readline()
    heard: dict[str, Any] = json.loads(line) if line else {}
    return heard


if __name__ == "__main__":
    main()
