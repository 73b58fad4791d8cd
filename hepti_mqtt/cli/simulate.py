"""`hepti simulate`: what a site would do, from a file and without devices."""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.checkpoint import KINDS, Checkpoint, described_spec, is_kind, onnx_file, spec_of_kind
from hepti_mqtt.cli import output
from hepti_mqtt.cli.show import explain_plan, needs_simulation, print_candidates, what_if, write_pictures
from hepti_mqtt.cli.sizing import first_token_s, run_s, size
from hepti_mqtt.client.simulated import simulate_plan
from hepti_mqtt.config import load_yaml
from hepti_mqtt.config.options import PinOptions
from hepti_mqtt.config.settings import CONFIG_DIR, nearest
from hepti_mqtt.config.sites import find_site
from hepti_mqtt.core.errors import ConfigError, PlanError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.explain import plan_work_factor
from hepti_mqtt.cost.simulator import ROUNDS, TopicNames
from hepti_mqtt.models import (
    ModelSpec,
    largest_shape,
    quantised,
    representative_shape,
    spec_from_config,
    with_cache,
)
from hepti_mqtt.models.speech import SpeechInput
from hepti_mqtt.planner import Candidate, Decision, Question, decide, decide_within_accuracy, wire_errors
from hepti_mqtt.planner.price import SINGLE

SITE: Final = "home"
DEFAULT_TOKENS: Final = 128


def simulate(args: argparse.Namespace) -> int:
    """Price every strategy for the devices of a site file; print the ranking and, on request, the time line."""
    if (args.board is None) == (args.devices_file is None):
        raise ConfigError("give --devices-file for one site, or --board for a table of 1 to 8 boards")
    spec = _spec(args)
    _check_tokens(args, spec)
    if args.board is not None:
        return size(args, spec)
    cluster = find_site(args.devices_file)
    question = _question(args, cluster, spec)
    try:
        decision = _decide(args, question)
    except PlanError as error:
        output.print_lines(error.detail if args.explain and not args.json else ())
        raise
    chosen = decision.chosen.plan
    played = simulate_plan(SITE, spec, chosen, question.shape, cluster) if needs_simulation(args) else None
    if played is not None:
        write_pictures(args, played)
    if args.json:
        work = plan_work_factor(spec, chosen, question.shape).to_dict()
        result = {"chosen": chosen.to_dict(), "reason": decision.reason, "work": work}
        candidates = [_candidate(question, c) for c in decision.ranking]
        output.print_json({**result, "candidates": candidates, "texts": _texts(question, decision)})
        return 0
    _print_ranking(args.model, question, decision)
    if played is not None and args.explain:
        output.print_lines(what_if(SITE, spec, chosen, question.shape, cluster))
        explain_plan(played, args.layer)
    return 0


def _question(args: argparse.Namespace, cluster: Cluster, spec: Spec) -> Question:
    pins = PinOptions.from_args(args).to_pins()
    shape = representative_shape(spec, args.tokens, args.sequences)
    requests = args.requests or (ROUNDS * args.in_flight if args.explain else 0)
    naming, version = TopicNames(SITE, "model"), PlanVersion(1, 1)
    return pins.question(naming, spec, cluster, shape, version, in_flight=args.in_flight, requests=requests)


def _decide(args: argparse.Namespace, question: Question) -> Decision:
    """Return the best plan; an accuracy budget needs the weights, to measure the errors of narrow wires."""
    if question.accuracy is None:
        return decide(question)
    if args.model in KINDS or not Path(args.model).exists():  # a name of both is the kind
        raise ConfigError(
            "--accuracy needs the weights of a model directory or file; make a directory: "
            "hepti model make KIND --out DIR"
        )
    with Checkpoint.open(args.model, weights=PinOptions.from_args(args).quantised) as checkpoint:
        tensors = checkpoint.tensors()
        return decide_within_accuracy(question, {}, lambda plan: wire_errors(question.spec, plan, tensors))


def _candidate(question: Question, c: Candidate) -> dict[str, Any]:
    """Return a candidate as JSON."""
    candidate: dict[str, Any] = {"strategy": c.name, "devices": list(c.plan.devices)}
    candidate |= {key: getattr(c.plan, key) for key in ("route", "wire", "wire_error")}
    candidate |= {key: getattr(c.price, key) for key in ("feasible", "memory_share")}
    candidate |= {"predicted_ms": c.price.seconds * 1e3, "bytes": c.price.nbytes}
    candidate |= {"missing_bytes": dict(c.price.missing), "needs_bytes": dict(c.price.needs)}
    if (joules := c.price.joules(question.cluster)) is not None:
        candidate["joules"] = joules
    if question.shape.session_rows:
        candidate["step_ms"] = run_s(question, c, 1) * 1e3
    return candidate if c.price.load is None else candidate | {"load": c.price.load.to_dict()}


def _print_ranking(model: str, question: Question, decision: Decision) -> None:
    shape, load = question.shape, decision.chosen.price.load
    layouts = decision.chosen.plan.layouts
    what = f"a token of a text of {shape.session_rows}" if shape.session_rows else f"{shape.size} tokens"
    print_candidates(f"{model}, {what}, simulated", decision.ranking)
    output.print_lines([f"why: {decision.reason}", *_energy(question, decision)])
    if shape.session_rows:
        for name, text in _texts(question, decision).items():
            rate, first_s = text["tokens_per_s"], text["first_token_ms"] / 1e3
            fits = "" if text["feasible"] else ", which does not fit"
            needs = f"{text['needs_bytes'] / output.MIB:.0f} MiB per board"
            speaks = isinstance(question.spec.input_spec, SpeechInput)
            prompt = "a recording" if speaks else f"a prompt of {shape.session_rows} tokens"
            speed = f"{rate:.1f} tokens/s, the first after {first_s:.1f} s of {prompt}"
            output.print_lines([f"{name}{fits}: {speed}, {needs}"])
        output.print_lines(
            f"runs of more than {most} tokens are divided as in {name}" for name, most in layouts.items()
        )
    if (error := decision.chosen.plan.wire_error) is not None:
        output.print_lines([f"{decision.chosen.plan.wire} on the wire moves the answer by {error:.1e} of it"])
    if load is not None:
        alone_ms = decision.chosen.price.seconds * 1e3
        output.print_lines([f"{decision.chosen.plan.method}: latency alone {alone_ms:.1f} ms; {load.text()}"])


def _texts(question: Question, decision: Decision) -> dict[str, dict[str, Any]]:
    """Return the speed of a text under the chosen plan, and on one board whether the model fits it or not."""
    if not question.shape.session_rows:
        return {}
    alone = [c for c in decision.ranking if c.name == SINGLE][:1]
    return {
        c.name: {
            "tokens_per_s": 1 / run_s(question, c, 1),
            "first_token_ms": first_token_s(question, c) * 1e3,
            "needs_bytes": max(c.price.needs.values()),
            "feasible": c.price.feasible,
        }
        for c in (decision.chosen, *alone)
    }


def _energy(question: Question, decision: Decision) -> list[str]:
    """Return the energy of the chosen plan and the deadline, if the site file has watts."""
    chosen, deadline_ms = decision.chosen, question.cluster.deadline_s * 1e3
    if (joules := chosen.price.joules(question.cluster)) is None:
        return []
    late = "" if chosen.price.seconds * 1e3 <= deadline_ms else ", missed"
    until = f"; the deadline is {deadline_ms:g} ms{late}" if deadline_ms < inf else ""
    return [f"energy: {chosen.name} draws {joules:.3g} J of a request in {chosen.price.seconds * 1e3:.1f} ms{until}"]


def _spec(args: argparse.Namespace) -> Spec:
    """Return the spec of a kind, a name in models.yaml, or files with or without weights; its texts fit --context."""
    name, pins = args.model, PinOptions.from_args(args)
    weights, cache = pins.quantised, pins.kv_cache
    if is_kind(name) or name in (configs := load_yaml(CONFIG_DIR / "models.yaml")):
        spec = spec_of_kind(name) if is_kind(name) else spec_from_config(configs[name], {})
        spec = with_cache(spec if weights is None else quantised(spec, weights), cache)
    elif onnx_file.find_onnx(Path(name)):
        with Checkpoint.open(name, weights=weights, cache=cache) as checkpoint:
            spec = checkpoint.spec
    elif Path(name).exists():
        spec = described_spec(name, weights, cache)
    else:
        words = [*(kind for kind in KINDS if not kind.startswith("tiny-")), *configs]
        near = nearest(name, words) or f"; there are {', '.join(words)}"
        raise ConfigError(f"{name!r} is no model directory, no ONNX or GGUF file, and no name of a model{near}")
    if isinstance(spec, ModelSpec) and largest_shape(spec).session_rows:
        return replace(spec, max_tokens=min(spec.max_tokens, max(args.context, args.tokens or 0)))
    return spec


def _check_tokens(args: argparse.Namespace, spec: Spec) -> None:
    """Give --tokens its default; raise ConfigError for more than the model reads, and for models without tokens."""
    if args.tokens is None:
        args.tokens = min(DEFAULT_TOKENS, max(largest_shape(spec).session_rows, largest_shape(spec).size))
        return
    shape = representative_shape(spec, args.tokens)
    if max(shape.session_rows, shape.size) != args.tokens:
        most = max(largest_shape(spec).session_rows, largest_shape(spec).size)
        raise ConfigError(f"--tokens {args.tokens}: {args.model} reads {most} at most, or always as many")
