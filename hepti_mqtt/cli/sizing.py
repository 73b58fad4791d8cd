"""`hepti simulate --board`: how many boards of a kind a model needs, as one table."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final

from hepti_mqtt.cli import output
from hepti_mqtt.config.options import PinOptions
from hepti_mqtt.config.sites import board_site
from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models import largest_shape, representative_shape
from hepti_mqtt.models.speech import SpeechInput
from hepti_mqtt.planner import Candidate, Question, decide, price

BOARDS: Final = (1, 2, 3, 4, 6, 8)
BAR: Final = 24  # characters of the longest bar


@dataclass(frozen=True, slots=True)
class Row:
    """What a number of boards does.

    tokens_per_s: of a text that a decoder writes, else of the request. prompt_tokens_per_s, first_token_ms: decoders.
    """

    boards: int
    plan: str
    tokens_per_s: float
    request_ms: float
    memory_mib: float
    memory_share: float
    prompt_tokens_per_s: float | None = None
    first_token_ms: float | None = None


def size(args: argparse.Namespace, spec: Spec) -> int:
    """Print what 1 to 8 boards do with a model, and the fewest that reach the wanted tokens/s."""
    rows, lacking = [], ""
    for count in BOARDS:
        try:
            rows.append(_row(args, spec, count))
        except PlanError as error:
            lacking = str(error)
    if not rows:
        raise PlanError(f"{args.model} does not fit {BOARDS[-1]} boards of {args.board}: {lacking}")
    wanted = args.tokens_per_s
    fewest = next((row.boards for row in rows if wanted and row.tokens_per_s >= wanted), None)
    if args.json:
        shown = [{name: getattr(row, name) for name in Row.__slots__} for row in rows]
        output.print_json({"model": args.model, "board": args.board, "boards": fewest, "rows": shown})
        return 0
    _print(args, spec, rows)
    if wanted:
        reached = f"{fewest} boards" if fewest else f"not reached with {BOARDS[-1]} boards"
        output.print_lines([f"{wanted:g} tokens/s: {reached}"])
    return 0


def _row(args: argparse.Namespace, spec: Spec, count: int) -> Row:
    """Return what so many boards do; raises PlanError if the model does not fit."""
    cluster = board_site(args.board, count, args.network)
    shape = representative_shape(spec, args.tokens)
    pins = replace(PinOptions.from_args(args).to_pins(), devices=None)
    question = pins.question(TopicNames("home", "model"), spec, cluster, shape, PlanVersion(1, 1))
    chosen = decide(question, chosen_only=True).chosen
    seconds = chosen.price.seconds
    most = max(chosen.price.needs.values())
    common = {"memory_mib": most / output.MIB, "memory_share": chosen.price.memory_share}
    plan = f"{chosen.name} on {len(chosen.plan.devices)}"
    if not shape.session_rows:
        return Row(count, plan, shape.size / seconds, seconds * 1e3, **common)
    rows, first_s = prompt_rows(question), first_token_s(question, chosen)
    of_prompt = rows * ceil(shape.session_rows / rows) / first_s
    return Row(
        count, plan, 1 / seconds, seconds * 1e3, **common, prompt_tokens_per_s=of_prompt, first_token_ms=first_s * 1e3
    )


def prompt_rows(question: Question) -> int:
    """Return how many tokens of a prompt one run computes."""
    return min(largest_shape(question.spec).size, question.shape.session_rows)


def first_token_s(question: Question, c: Candidate) -> float:
    """Return the seconds until the first token after a prompt or a recording, under a candidate's plan."""
    if isinstance(question.spec.input_spec, SpeechInput):  # one run encodes the recording and reads the prompt
        return c.price.seconds
    rows = prompt_rows(question)
    return ceil(question.shape.session_rows / rows) * run_s(question, c, rows)


def run_s(question: Question, c: Candidate, rows: int = 1) -> float:
    """Return the seconds of a run of some tokens of a text, under a candidate's plan."""
    run = replace(question, shape=question.shape.decode_step(rows), requests=0)
    return price(run, c.plan, full=True).seconds


def _print(args: argparse.Namespace, spec: Spec, rows: list[Row]) -> None:
    writes = rows[0].first_token_ms is not None
    best = max(row.tokens_per_s for row in rows)
    columns: list[Any] = ["boards", "tokens/s"]
    columns += ["prompt tokens/s", "first token s"] if writes else ["ms"]
    cells = []
    for row in rows:
        speed = [f"{row.tokens_per_s:.1f}"]
        if writes:
            speed += [f"{row.prompt_tokens_per_s:.0f}", f"{(row.first_token_ms or 0.0) / 1e3:.1f}"]
        else:
            speed += [f"{row.request_ms:.0f}"]
        bar = "█" * max(round(BAR * row.tokens_per_s / best), 1)
        cells.append((row.boards, *speed, f"{row.memory_mib:.0f} ({row.memory_share:.0%})", row.plan, bar))
    what = f"a prompt of {args.tokens} tokens" if writes else f"{representative_shape(spec, args.tokens).size} tokens"
    title = f"{args.model} on {args.board}, {args.network}, {what}; simulated, with assumed rates of the board"
    output.print_table(title, (*columns, "MiB per board", "plan", "tokens/s"), cells)
