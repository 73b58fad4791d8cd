"""What the kernels' benchmark can be told; nothing heavy is imported here, since every `hepti` command parses it."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

OUT: Final = Path("results/kernels")
# The keys of kernel_cases.GROUPS, which checks that they are.
GROUPS: Final = ("linear", "curve", "stream", "int8", "layer", "threads")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure; `seconds` ends a run early, and the next one goes on."""

    out: Path
    quick: bool = False
    threads: tuple[int, ...] = (1, 2)
    only: tuple[str, ...] = GROUPS
    seed: int = 1
    seconds: float | None = None
    command: str = ""


def add_arguments(group: Any) -> None:
    """Add the arguments of `hepti bench kernels` to a group of a parser that has --quick and --out."""
    group.add_argument("--threads", type=_numbers, default=(1, 2), metavar="1,2", help="thread counts (default 1,2)")
    group.add_argument("--only", type=_groups, default=GROUPS, metavar="GROUP,..", help=f"of {', '.join(GROUPS)}")
    group.add_argument("--seed", type=int, default=1, help="of the data and the sample (default 1)")
    group.add_argument("--seconds", type=float, help="stop after so long; the same command goes on from there")


def options_of(args: argparse.Namespace) -> Options:
    """Return the options that `add_arguments` has parsed."""
    return Options(args.out or OUT, args.quick, args.threads, args.only, args.seed, args.seconds, command())


def command() -> str:
    """Return the command of this process as one would type it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of thread counts, such as 1,2")
    return numbers


def _groups(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := set(chosen) - set(GROUPS):
        raise argparse.ArgumentTypeError(
            f"there is no group {', '.join(sorted(unknown))}; the groups are {', '.join(GROUPS)}"
        )
    return chosen
