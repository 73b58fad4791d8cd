"""Short chats of real processes, some cancelled midway: each turn begins like the one before and takes its cache over.

Every token is compared with the text that the reference has for its prompt. `python tests/helpers/chat_soak.py` prints
what became of the chats; the exit code is 1 if a token was wrong, or a chat ended with an error.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from site_processes import SITE, running_site

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.errors import HeptiError

MODEL = "chat"
LONGEST = 256
TURNS = 4
MOST = 24  # tokens of a turn
VOCAB = 211
ENDS = 20  # tokens that end a text: most turns end before MOST, with steps ordered ahead
READY_S = 120.0
WAYS: Sequence[Mapping[str, Any]] = (
    {"strategy": "decoder", "devices": ["a", "b"], "route": "mesh"},
    {"strategy": "single", "devices": ["a"]},
)


@dataclass(frozen=True)
class Turn:
    """A prompt, and the tokens that follow it undisturbed."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass
class Result:
    """What became of the turns."""

    right: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        return not self.wrong and not self.errors and self.right > 0

    def __str__(self) -> str:
        lines = [f"{self.right} turns right, {self.cancelled} of them cancelled midway; errors {dict(self.errors)}"]
        return "\n".join([*lines, *(f"WRONG: {line}" for line in self.wrong[:10])])


def chat_model(directory: Path, seed: int) -> Path:
    """Write the model, with many tokens that end a text."""
    kind = make.KINDS["tiny-llama"]
    config = {**kind.config, "max_position_embeddings": LONGEST, "rope_scaling": None}
    make.KINDS["chat"] = replace(kind, config=config)
    try:
        path = make_model("chat", directory / MODEL, seed)
    finally:
        del make.KINDS["chat"]
    ends = random.Random(seed).sample(range(VOCAB), ENDS)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return path


def conversations(path: Path, count: int, seed: int) -> list[list[Turn]]:
    """Return chats whose turns begin like the ones before, up to some token of the answer."""
    rng, out = random.Random(seed), []
    ends = set(json.loads((path / "generation_config.json").read_text())["eos_token_id"])
    with Checkpoint.open(path, MODEL) as checkpoint:
        spec, tensors = checkpoint.spec, dict(checkpoint.tensors())
        for _ in range(count):
            turns, prompt = list[Turn](), [rng.randrange(VOCAB) for _ in range(rng.randint(18, 40))]
            for _ in range(TURNS):
                ids = list(prompt)
                while len(ids) < len(prompt) + MOST and (len(ids) == len(prompt) or ids[-1] not in ends):
                    shape, inputs = models.single_sequence(spec, np.array(ids, np.int32))
                    ids.append(int(models.reference(spec, tensors, inputs, shape)[1][-1].argmax()))
                turns.append(Turn(tuple(prompt), tuple(ids[len(prompt) :])))
                kept = len(prompt) + rng.randint(0, len(turns[-1].tokens))
                prompt = ids[:kept] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
            out.append(turns)
    return out


class Clients:
    """Clients that chat side by side until the number of turns is reached."""

    def __init__(self, url: str, turns: int, seed: int, clients: int, chats: Sequence[Sequence[Turn]]) -> None:
        self.result, self._lock, self._left = Result(), threading.Lock(), turns
        self._url, self._seed, self._chats = url, seed, chats
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]

    def run(self) -> Result:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        return self.result

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        with Hepti.connect(self._url, site=SITE, client_id=f"chat-{number}") as hepti:
            while True:
                way = rng.choice(WAYS)
                for turn in rng.choice(self._chats):
                    with self._lock:
                        self._left -= 1
                        if self._left < 0:
                            return
                    stop = rng.randint(1, len(turn.tokens)) if rng.random() < 0.3 else None
                    self._turn(hepti, turn, way, stop)

    def _turn(self, hepti: Hepti, turn: Turn, way: Mapping[str, Any], stop: int | None) -> None:
        """Take the tokens of a turn, cancelled after `stop` of them, and compare."""
        tokens: list[int] = []
        stream = hepti.generate(MODEL, ids=list(turn.prompt), max_new_tokens=MOST, **way)
        try:
            for part in stream:
                tokens.append(part["token"])
                if len(tokens) == stop:
                    break
        except HeptiError as error:
            with self._lock:
                self.result.errors[f"{error.code}: {error}"] += 1
            return
        finally:
            stream.close()
        expected = turn.tokens[: len(tokens)] if stop is not None else turn.tokens
        with self._lock:
            if tuple(tokens) != expected:
                self.result.wrong.append(f"{way} {turn.prompt}: {tokens} instead of {expected}")
                return
            self.result.right += 1
            self.result.cancelled += stop is not None


def run(turns: int, directory: Path, seed: int = 1, clients: int = 6, chats: int = 40) -> Result:
    """Let clients chat with a site of two agents; return what became of the turns."""
    path = chat_model(directory, seed)
    references = conversations(path, chats, seed)
    for site in running_site(directory, {MODEL: path}, {"a": "300MiB", "b": "300MiB"}):
        with Hepti.connect(site.url, site=SITE, client_id="first") as hepti:
            hepti.wait_ready(MODEL, READY_S)
            for way in WAYS:
                hepti.infer(MODEL, ids=[1, 2], max_new_tokens=2, timeout_s=READY_S, **way)
        return Clients(site.url, turns, seed, clients, references).run()
    raise AssertionError("no site")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hepti-chats-") as directory:
        result = run(args.turns, Path(directory), args.seed)
    print(f"seed {args.seed}, {args.turns} turns: {result}")
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())
