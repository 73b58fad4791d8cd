"""Text on the hosts of a lab: a GGUF model divided, on one of them, and llama.cpp on one of them, interleaved.

`python -m benchmarks decoding model=FILE llama=DIR`; llama: with the libraries of `outside.llama_cpp`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.files import find
from benchmarks.lab.calibrate import calibrate
from benchmarks.lab.hosts import Process
from benchmarks.lab.lab import Lab
from benchmarks.lab.site import LabSite
from benchmarks.lab.spec import load
from benchmarks.tables import table

PATIENCE_S: Final = 900.0
OUTSIDE, ONE, ALL, NARROW = "llama.cpp, one host", "Hepti, one host", "Hepti, all hosts", "Hepti, all hosts, float16"
PARTS: Final = ("first_s", "rest_s")
HEADS: Final = (
    "", "prompt, tokens/s", "text, tokens/s", "prompt over llama.cpp", "text over llama.cpp", "prompt over one host",
    "text over one host", "first tokens as on one host", "plan",
)  # fmt: skip
CHOSEN: Final = "Hepti's choice"


def main(
    model: str,
    llama: str,
    cpu: str = "zen4",
    lab: str = "four-pi4",
    rate: float = 940.0,
    prompt: int = 512,
    count: int = 32,
    rounds: int = 3,
    settle: int = 4,
    words: tuple[int, int] = (3, 250),
    x: str = "w8a8",
) -> None:
    """Print seconds and ratios; words: the first and last id of prompts, another prompt in each round."""
    spec = replace(load(find("labs", Path(lab))), rate_mbit=rate)
    random = np.random.default_rng(0)
    prompts = [random.integers(words[0], words[1], prompt).tolist() for _ in range(settle + rounds)]
    with TemporaryDirectory(prefix="hepti-decoding-") as scratch, Lab(spec, Path(scratch) / "lab") as hosts:
        calibrate(hosts, spec, lambda line: print(line, file=sys.stderr))
        names = list(hosts.hosts)
        with LabSite(hosts, {"decoder": Path(model).resolve()}, ("--weights", x)) as site:
            outside = hosts.hosts[names[0]].talk(
                "llama", "benchmarks.outside.decoding", environment={"OMP_NUM_THREADS": "1"}
            )
            hepti = site.talk("decoding", "benchmarks.outside.decoding")
            _say(outside, do="read", model=str(Path(model).resolve()), llama=llama, cpu=cpu, rows=prompt + count)
            _say(hepti, do="meet", model="decoder")
            plain = {"speculate": False}
            asked: dict[str, tuple[Process, dict[str, Any]]] = {
                OUTSIDE: (outside, {}),
                ONE: (hepti, {**plain, "strategy": "single", "devices": names[:1]}),
                ALL: (hepti, {**plain, "strategy": "decoder", "devices": names}),
                NARROW: (hepti, {**plain, "strategy": "decoder", "devices": names, "wire": "f16"}),
                CHOSEN: (hepti, plain),
            }
            hosts.throttle(False)  # weights are loaded at full speed; what is measured there would teach nothing
            for process, keys in asked.values():
                if process is hepti:
                    _say(process, do="ask", ids=prompts[0], count=0, **keys)
            hosts.throttle(True)
            for ids in prompts[:settle]:
                for name in (CHOSEN, NARROW):
                    process, keys = asked[name]
                    found = _say(process, do="ask", ids=ids, count=count, **keys)
                    print(name, {key: found[key] for key in ("plan", "first_s", "rest_s")}, file=sys.stderr)
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
            for number, ids in enumerate(prompts[settle:]):
                for name in list(asked)[:: 1 if number % 2 == 0 else -1]:
                    process, keys = asked[name]
                    answers[name].append(_say(process, do="ask", ids=ids, count=count, **keys))
    rows = [
        (
            name,
            *(
                f"{n / median(answer[part] for answer in own):.1f}"
                for part, n in zip(PARTS, (prompt, count - 1), strict=True)
            ),
            *(_ratio(answers[other], own, part) for other in (OUTSIDE, ONE) for part in PARTS),
            min(_same(*pair) for pair in zip(answers[ONE], own, strict=True)),
            own[-1]["plan"],
        )
        for name, own in answers.items()
    ]
    print(
        f"{Path(model).name}, {spec.name}, {rate:g} Mbit/s, {prompt} tokens, then {count}; {rounds} rounds; medians\n"
    )
    print("\n".join(table(HEADS, rows)))


def _ratio(others: list[dict[str, Any]], mine: list[dict[str, Any]], part: str) -> str:
    """Return how many times as fast as the other, the median of the ratios within rounds."""
    return f"{median(their[part] / own[part] for their, own in zip(others, mine, strict=True)):.2f}"


def _same(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return how many first tokens are the same."""
    pairs = list(zip(one["tokens"], other["tokens"], strict=True))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _say(process: Process, **order: Any) -> dict[str, Any]:
    process.send(json.dumps(order))
    return dict(json.loads(process.receive(PATIENCE_S)))
