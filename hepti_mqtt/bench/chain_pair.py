"""Two hosts of a lab that measure cases of the chain of MatMuls over the site's broker."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Final

from hepti_mqtt.bench.chain import KINDS, PRIMARY, SECONDARY, Case
from hepti_mqtt.errors import LabError
from hepti_mqtt.lab.hosts import Host, Talking

PATIENCE_S: Final = 120.0
TOLERANCE: Final = 1e-4  # of five f32 sums over 1024 terms whose results are of size 1


class ChainPair:
    """The processes of both devices; `close` ends them.

    hosts: the primary and the secondary. run: a name, by which the topics of two runs on one broker differ.
    """

    def __init__(self, primary: Host, secondary: Host, broker: str, run: str, seed: int = 0) -> None:
        self._talks: dict[str, Talking] = {}
        with ExitStack() as failed:
            failed.callback(self.close)
            for device, host in ((PRIMARY, primary), (SECONDARY, secondary)):
                arguments = ["-m", "hepti_mqtt.bench.chain_host", "--broker", broker, "--device", device, "--run", run]
                # NumPy computes the reference only; its threads must not outlive a case.
                environment = {"OPENBLAS_NUM_THREADS": "1"}
                self._talks[device] = host.talk(
                    f"chain-{device}", [host.python, *arguments, "--seed", str(seed)], environment
                )
            for talk in self._talks.values():
                _answer(talk)
            failed.pop_all()

    def measure(self, case: Case) -> dict[str, Any]:
        """Return a record of one case; raises LabError if a device fails or the product is wrong."""
        for talk in self._talks.values():
            talk.send(json.dumps(asdict(case)))
        for talk in self._talks.values():
            _answer(talk)
        for talk in reversed(self._talks.values()):  # the secondary waits before the primary sends
            talk.send("")
        said = {device: _answer(talk) for device, talk in self._talks.items()}
        errors = [words["error"] for words in said.values() if words["error"] is not None]
        error = max(errors)
        if not error <= TOLERANCE:  # NaN is wrong too
            raise LabError(f"{case} gives a product that differs from NumPy's by {error:g}; its time means nothing")
        return {
            **asdict(case),
            "latency_s": said[PRIMARY]["latency_s"],
            "primary_compute_s": said[PRIMARY]["compute_s"],
            "secondary_compute_s": said[SECONDARY]["compute_s"],
            "bytes": sum(words["sent_bytes"] for words in said.values()),
            "error": error,
        }

    def close(self) -> None:
        """End both processes."""
        for talk in self._talks.values():
            if talk.poll() is None:
                talk.signal(15)
                talk.wait(PATIENCE_S)


def cases(rows: Sequence[int], shares: Sequence[int], chunks: int) -> tuple[Case, ...]:
    """Return every case of the experiment: one device, and for each share the parts, the way, and both together."""
    alone = tuple(Case(m) for m in rows)
    kinds = tuple(Case(m, share, 1, kind) for m in rows for share in shares for kind in KINDS)
    overlapped = tuple(Case(m, share, chunks) for m in rows for share in shares if chunks > 1)
    return alone + kinds + overlapped


def rounds(
    pair: ChainPair, todo: Sequence[tuple[int, Case]], seed: int, condition: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a record for each (round, case), each round in an order of its own, after one turn of every case unkept.

    condition: what every record says beside its measurement, for example rate_mbit and cpu_percent.
    """
    for case in dict.fromkeys(case for _, case in todo):
        pair.measure(case)
    for number in sorted({number for number, _ in todo}):
        own = [case for n, case in todo if n == number]
        random.Random(f"{seed}/{number}").shuffle(own)
        for case in own:
            yield {"round": number, **condition, **pair.measure(case)}


def _answer(talk: Talking) -> dict[str, Any]:
    words: dict[str, Any] = json.loads(talk.receive(PATIENCE_S))
    return words
