"""50 short requests from one client at once, run together and each by itself, on this machine.

Two sites, one of which packs what waits and one does not, take turns, so that a drifting machine hits both alike.
Answers are checked against the NumPy reference before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.errors import BenchError
from benchmarks.lab.lab import Lab
from benchmarks.lab.site import LabSite
from benchmarks.lab.spec import HostSpec, LabSpec
from benchmarks.tables import table
from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.cli.demo import AGENTS
from hepti_mqtt.cli.shared import AgentOptions
from hepti_mqtt.client import Answer, Hepti
from hepti_mqtt.service.requests import read_input

BOUND: Final = 5e-5
PATIENCE_S: Final = 120.0
PLANS: Final[Mapping[str, tuple[Sequence[AgentOptions], tuple[str, ...]]]] = {
    "one device": ([AgentOptions("agent0", 1, "1GiB")], ()),
    "one of two threads": ([AgentOptions("agent0", 2, "1GiB")], ()),
    "two devices": ([AgentOptions(f"agent{i}", 1, "1GiB") for i in range(2)], ("--strategy", "row", "--variant", "kv")),
    "the demo's": (AGENTS, ()),
}


def main(
    model: str = "minilm", tokens: int = 9, requests: int = 50, repeat: int = 15, sites: Sequence[str] = tuple(PLANS)
) -> None:
    """Print medians and ratios for each of the sites."""
    rows = []
    with TemporaryDirectory(prefix="hepti-batching-") as scratch:
        directory = make_model(model, Path(scratch) / "model")
        with Checkpoint.open(directory, "model") as checkpoint:
            for number, plan in enumerate(sites):
                rows += _rows(checkpoint, directory, Path(scratch) / str(number), plan, (tokens, requests, repeat))
    print(f"{requests} requests of {tokens} tokens at once from one client, {model}; medians of {repeat} turns\n")
    names = ("site", "requests/s", "ms for all", "one request alone, ms", "max error", "throughput")
    print("\n".join(table(names, rows)))


def _rows(
    checkpoint: Checkpoint, directory: Path, scratch: Path, plan: str, sizes: tuple[int, int, int]
) -> list[tuple[Any, ...]]:
    """Let both sites answer by turns; the throughput is the median of the turns' ratios."""
    (agents, pins), (tokens, requests, repeat) = PLANS[plan], sizes
    vocab = checkpoint.spec.input_spec.upper_bound
    many, single = dict[str, list[float]](), dict[str, list[float]]()
    with ExitStack() as stack:
        users: dict[str, Hepti] = {}
        for name, options in (("alone", ("--batch", "1")), ("together", ())):
            spec = LabSpec(name, "local", tuple(HostSpec(agent.device) for agent in agents))
            lab = stack.enter_context(Lab(spec, scratch / name))
            named = {agent.device: agent for agent in agents}
            site = stack.enter_context(LabSite(lab, {"model": directory}, (*options, *pins), named))
            users[name] = stack.enter_context(Hepti.connect(site.url, site=site.site))
        errors = {name: _checked(checkpoint, user, _ids(vocab, tokens, requests, 0)) for name, user in users.items()}
        for turn in range(-2, repeat):  # Programs are built in the first ones
            for name, user in users.items():
                seconds, _ = _all(user, _ids(vocab, tokens, requests, 10 + turn))
                alone = [_all(user, [ids])[0] for ids in _ids(vocab, tokens, 10, 1000 + turn)]
                if turn >= 0:
                    many.setdefault(name, []).append(seconds)
                    single.setdefault(name, []).extend(alone)
    gain = median(a / b for a, b in zip(many["alone"], many["together"], strict=True))
    return [
        (
            *(f"{plan}, {name}", round(requests / median(many[name])), round(1e3 * median(many[name]))),
            *(f"{1e3 * median(single[name]):.1f}", f"{errors[name]:.0e}", f"{gain if name == 'together' else 1:.1f}"),
        )
        for name in users
    ]


def _ids(vocab: int, tokens: int, count: int, seed: int) -> list[list[int]]:
    """Return requests of random tokens, none of which comes twice."""
    return [list(map(int, row)) for row in np.random.default_rng(seed).integers(0, vocab, (count, tokens))]


def _all(user: Hepti, requests: Sequence[list[int]]) -> tuple[float, list[Answer]]:
    """Return the seconds from the first request to the last answer, and the answers."""
    begun = time.perf_counter()
    futures = [user.submit("model", ids=ids) for ids in requests]
    answers = [future.result(PATIENCE_S) for future in futures]
    return time.perf_counter() - begun, answers


def _checked(checkpoint: Checkpoint, user: Hepti, requests: Sequence[list[int]]) -> float:
    """Return the largest error of any answer; raises BenchError for one that is wrong."""
    worst = 0.0
    for ids, answer in zip(requests, _all(user, requests)[1], strict=True):
        prepared = read_input(checkpoint, {"ids": ids})
        _, wanted = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
        worst = max(worst, float(np.abs(np.array(answer.result["embedding"]) - wanted[0]).max()))
    if not worst < BOUND:
        raise BenchError(f"an answer is wrong by {worst:g}; nothing was timed")
    return worst
