"""Text on the hosts of a lab: a GGUF model divided, on one of them, and llama.cpp on one of them, interleaved.

`python -m benchmarks decoding model=FILE llama=DIR`; llama: with the libraries of `outside.llama_cpp`. With
`repeated=TEXT` the prompt is that text three times and its beginning, which a real model goes on with: it shows what
guesses are worth.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.files import find
from benchmarks.lab.beside import Asked, beside, in_turn, ratio, say
from benchmarks.lab.spec import load
from benchmarks.tables import table
from hepti_mqtt.checkpoint import Checkpoint

OUTSIDE, ONE, ALL, NARROW = "llama.cpp, one host", "Hepti, one host", "Hepti, all hosts", "Hepti, all hosts, float16"
PARTS: Final = ("first_s", "rest_s")
HEADS: Final = (
    "", "prompt, tokens/s", "text, tokens/s", "prompt over llama.cpp", "text over llama.cpp", "prompt over one host",
    "text over one host", "first tokens as on one host", "plan",
)  # fmt: skip
CHOSEN, GUESSED = "Hepti's choice", "Hepti, all hosts, guesses"


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
    repeated: str = "",
) -> None:
    """Print seconds and ratios; words: the first and last id of prompts, another prompt in each round.

    repeated: a text, of which the prompt of every round is made instead; then sites hold the prompt already.
    """
    spec = replace(load(find("labs", Path(lab))), rate_mbit=rate)
    random = np.random.default_rng(0)
    prompts = [random.integers(words[0], words[1], prompt).tolist() for _ in range(settle + rounds)]
    if repeated:
        prompts = [_prompt(model, repeated)] * (settle + rounds)
        prompt = len(prompts[0])
    with beside(spec, "benchmarks.outside.decoding", "decoder", Path(model).resolve(), ("--weights", x)) as both:
        outside, hepti, names = both.outside, both.site, both.names
        say(outside, do="read", model=str(Path(model).resolve()), llama=llama, cpu=cpu, rows=prompt + count)
        say(hepti, do="meet", model="decoder")
        plain = {"speculate": False}
        ways = {
            OUTSIDE: Asked(outside, {}),
            ONE: Asked(hepti, {**plain, "strategy": "single", "devices": names[:1]}),
            ALL: Asked(hepti, {**plain, "strategy": "decoder", "devices": names}),
            NARROW: Asked(hepti, {**plain, "strategy": "decoder", "devices": names, "wire": "f16"}),
            CHOSEN: Asked(hepti, plain),
        }
        if repeated:  # else the prompt of one way would be in the cache of the other, which has the same plan
            ways[GUESSED] = Asked(hepti, {"strategy": "decoder", "devices": names})
        for process, keys in ways.values():
            if process is hepti:
                say(process, do="ask", ids=prompts[0], count=0, **keys)
        for ids in prompts[:settle]:
            for name in [name for name in ways if name in (CHOSEN, NARROW, GUESSED)]:
                found = say(hepti, do="ask", ids=ids, count=count, **ways[name].keys)
                print(name, {key: found[key] for key in ("plan", "first_s", "rest_s")}, file=sys.stderr)
        answers = in_turn(ways, [{"ids": ids, "count": count} for ids in prompts[settle:]])
    for answer in (answer for own in answers.values() for answer in own):  # seconds for each token; texts may end early
        answer["first_s"] /= prompt
        answer["rest_s"] /= max(len(answer["tokens"]) - 1, 1)
    rows = [
        (
            name,
            *(f"{1 / median(answer[part] for answer in own):.1f}" for part in PARTS),
            *(ratio(answers[other], own, part) for other in (OUTSIDE, ONE) for part in PARTS),
            min(_same(*pair) for pair in zip(answers[ONE], own, strict=True)),
            own[-1]["plan"],
        )
        for name, own in answers.items()
    ]
    print(
        f"{Path(model).name}, {spec.name}, {rate:g} Mbit/s, {prompt} tokens, then {count}; {rounds} rounds; medians\n"
    )
    print("\n".join(table(HEADS, rows)))


def _prompt(model: str, text: str) -> list[int]:
    with Checkpoint.open(Path(model), "decoder") as checkpoint:
        ids = checkpoint.texts.tokenizer.encode(f"{text} ").ids
    return [*ids * 3, *ids[:6]]


def _same(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return how many first tokens are the same."""
    pairs = list(zip(one["tokens"], other["tokens"], strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
