"""Print changes of plan, loads and regret of many sites by kind of weather: python -m benchmarks.weather still cold.

Sites alternate between the bundled files. --jsonl: one line per site as well. --pictures: an SVG of each site.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.weather import KINDS, History, Verdict, judge, make_truth, play, weather_svg
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.settings import find_bundled_site
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.planner import decide
from hepti_mqtt.service.solver import solve

NOISE = 1.15  # of a run, and what a move must win
FILES = ("four-pi4-240", "mixed-four-roomy", "four-pi4")


def site_of(seed: int) -> Cluster:
    """Return the site file of a seed."""
    return load_site(find_bundled_site(Path(FILES[seed % len(FILES)])))


def play_site(kind: str, seed: int, minutes: float, model: str = "bert-large") -> History:
    """Play one site, whose file follows from its seed."""
    file = site_of(seed)
    return play(file, spec_of_kind(model), make_truth(kind, file, minutes, seed), solve)


def run_site(kind: str, seed: int, minutes: float, model: str = "bert-large") -> Verdict:
    """Return the verdict on one site."""
    return judge(play_site(kind, seed, minutes, model))


def read_recording(path: Path) -> Sequence[Any]:
    """Return the lines of a recording: JSON lines, packed by gzip."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def longest_worse_than_alone(history: History) -> float:
    """Return the longest time in which each request took longer than on the best device alone, with some noise."""
    question, names = replace(history.question, strategy="single"), history.truth.names
    alone = [decide(replace(question, devices=(device,))).chosen.plan.predicted_s for device in names]
    begun, found = inf, 0.0
    for answer in history.answers:
        best_s = min(np.array(alone) * history.truth.real.slowdown[answer.step])
        begun = min(begun, answer.asked_s) if answer.seconds > NOISE * best_s else inf
        found = max(found, answer.asked_s + answer.seconds - begun)
    return found


def rows(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the lines of a table: mean (median, 90 %) of each number, and of a script its phases."""

    def spread(values: Sequence[float], form: str) -> str:
        middle, most = np.quantile(values, [0.5, 0.9])
        return f"{np.mean(values):{form}} ({middle:{form}}, {most:{form}})"

    out = []
    for kind in dict.fromkeys(v.kind for v in verdicts):
        of = [v for v in verdicts if v.kind == kind]
        changes, loads = [v.changes_per_hour for v in of], [v.loads_per_hour for v in of]
        regrets, searches = [v.regret for v in of], [v.searches_per_hour for v in of]
        out.append(
            f"{kind:8} {len(of):3} sites  changes/h {spread(changes, '5.1f')}  with loads/h {spread(loads, '5.1f')}  "
            f"regret {spread(regrets, '6.1%')}  searches/h {np.mean(searches):5.1f}  "
            f"worst {max(v.worst_s for v in of):5.1f} s  refused {sum(v.refused for v in of)}"
        )
        for name in dict.fromkeys(p.name for v in of for p in v.phases) if kind == "changes" else ():
            phases = [p for v in of for p in v.phases if p.name == name]
            right = [p.right_s for p in phases if p.right_s is not None]
            out.append(
                f"   {name:12} regret {spread([p.regret for p in phases], '6.1%')}  "
                f"right after {spread(right or [np.nan], '5.1f')} s, never {len(phases) - len(right)}  "
                f"changes {np.mean([p.changes for p in phases]):4.1f}  worst {max(p.worst_s for p in phases):5.1f} s"
            )
        if kind == "changes":
            every = [p.regret for v in of for p in v.phases]
            out.append(f"   phases with at most 10 % of regret: {np.mean([r <= 0.1 for r in every]):.0%}")
    return out


def main() -> None:
    """Play the sites that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[], choices=KINDS)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default="bert-large")
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="DIR")
    args = parser.parse_args()
    for kind in args.kinds or KINDS:
        found = []
        for seed in range(args.first, args.first + args.sites):
            begun = time.monotonic()
            history = play_site(kind, seed, args.minutes, args.model)
            found.append(judge(history))
            if args.pictures is not None:
                args.pictures.mkdir(parents=True, exist_ok=True)
                drawing = weather_svg(history, f"{args.model}, {kind}, seed {seed}")
                (args.pictures / f"{kind}-{seed}.svg").write_text(drawing)
            line = json.dumps({"seed": seed, "took_s": round(time.monotonic() - begun, 1), **asdict(found[-1])})
            if args.jsonl is not None:
                with args.jsonl.open("a") as out:
                    out.write(line + "\n")
        print("\n".join(rows(found)), flush=True)


if __name__ == "__main__":
    main()
