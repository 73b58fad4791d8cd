"""`hepti infer`: send a request once or repeatedly, and time it from publish to answer."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.cli import output
from hepti_mqtt.cli.shared import PLANNER_S, check_readable, connect_to_site
from hepti_mqtt.client import Answer, Hepti
from hepti_mqtt.config.options import variant_options
from hepti_mqtt.core.errors import ConfigError, HeptiError, NetworkError, PlanError
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.models import ModelSpec, spec_from_dict

if TYPE_CHECKING:  # a request without --check needs no checkpoint
    from hepti_mqtt.checkpoint import Checkpoint

LONG_VECTOR, FEW_NUMBERS = 16, 6
LONG_TEXT, FEW_CHARACTERS = 2000, 60
ANSWER_S: Final = 120.0  # for an answer, if the user names no time
NO_PLAN_PATIENCE_S: Final = 3.0  # after the planner has said that there is no plan: devices may be on their way


def infer(args: argparse.Namespace) -> int:
    """Send the request; print the answer, or with --json the object that DESIGN documents."""
    if args.plan_only and (args.check or args.repeat > 1):
        raise ConfigError("--plan-only computes nothing: leave --check and --repeat out")
    _check_input(args)
    patient = args.timeout is not None
    until = time.monotonic() + (args.timeout or ANSWER_S)
    with connect_to_site(args, args.timeout) as hepti:
        args.timeout = until - time.monotonic()
        shown = _wait_for_plan(hepti, args, patient)
        with check_readable("the model"):
            spec = spec_from_dict(shown["spec"])
        body = request_body(args, spec) | ({"want": "plan"} if args.plan_only else {})
        tokens = args.max_new_tokens is not None and args.want != "hidden" and not args.plan_only
        if tokens and not args.json and args.repeat == 1:
            answers = [stream(hepti, args, body)]
        else:
            pinned = {**pin_arguments(args), "wait_for_plan": patient}
            answers = send_repeatedly(hepti, args.model, body, pinned, args.repeat, args.timeout, args.deadline_ms)
        if args.want != "hidden":
            answers[-1] = hepti.foretold(answers[-1], **body, **pin_arguments(args), timeout_s=args.timeout)
        error = None
        if args.check:
            directory = args.model_dir or shown.get("directory")
            error = check(hepti, args, body, directory, spec)
    result = summary(args.model, answers, error)
    if args.json:
        output.print_json(result)
    else:
        _print(answers[-1], result, shown)
    return 0


def _check_input(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together and files that cannot be read, before anything is sent."""
    for option, given, other, there in (
        ("--label", args.label, "--text or --image", args.text or args.image),
        ("--document", args.document, "--query", args.query is not None),
        ("--context", args.context is not None, "--question", args.question is not None),
        ("--translate", args.translate, "--audio", args.audio),
        ("--timestamps", args.timestamps, "--audio", args.audio),
    ):
        if given and not there:
            raise ConfigError(f"{option} needs {other}")
    for path in (*(args.image or ()), *filter(None, (args.audio,))):
        _read(path)


def _wait_for_plan(hepti: Hepti, args: argparse.Namespace, patient: bool) -> Mapping[str, Any]:
    """Return the record of the model's plans when one is active.

    patient: wait for a planner and a plan until the time is over, and say what for; else fail fast. A planner that is
    online has said all the models that it serves.
    """
    until = time.monotonic() + args.timeout
    with closing(output.ProgressLines()) as progress:
        while True:
            try:
                return _current_record(hepti, args, max(until - time.monotonic(), 0.1))
            except (NetworkError, PlanError) as error:
                if not patient or (left := until - time.monotonic()) <= 0:
                    raise
                progress.print("waiting", f"for at most {left:.0f} s more: {error}")


def _current_record(hepti: Hepti, args: argparse.Namespace, timeout: float) -> Mapping[str, Any]:
    """Return the record of the model's plans when one is active; fails fast without planner or model.

    A request with pins is searched for on its own, so it is sent even if there is no plan without them.
    """
    record = hepti.plan(args.model, timeout=min(PLANNER_S, timeout))
    if pin_arguments(args) and record.get("pinned"):
        return record  # the site is up; its own plan may have made room for the pinned one
    try:
        return hepti.wait_ready(args.model, timeout, patience_s=NO_PLAN_PATIENCE_S)
    except PlanError:
        if not pin_arguments(args):
            raise
    return record


def pin_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the user pinned, as keyword arguments of `Hepti.infer`."""
    names = ("strategy", "devices", "wire", "accuracy", "weights", "route", "objective")
    pins = {name: value for name in names if (value := getattr(args, name))}
    if args.variant:
        pins["options"] = variant_options(args.strategy, args.variant)
    return pins


def request_body(args: argparse.Namespace, spec: Spec) -> dict[str, Any]:
    """Return the request's input as keyword arguments of `Hepti.infer`; raises ConfigError for a missing file."""
    names = ("max_new_tokens", "want", "top_k", "prompt", "dimensions", "language", "window", "timestamps")
    options = {name: getattr(args, name) for name in (*names, "query", "question", "context")}
    options |= {"documents": args.document, "candidate_labels": args.label, "pairs": args.pair}
    options["task"] = "translate" if args.translate else None
    most = {key: value for key, value in options.items() if value is not None}
    extra = {"truncate": True, **most} if args.truncate else most
    if args.pair or args.query is not None or args.question is not None:
        return extra
    if args.text:
        return {"text": args.text[0], **extra} if len(args.text) == 1 else {"texts": args.text, **extra}
    if args.image:
        pictures = [base64.b64encode(_read(path)).decode() for path in args.image]
        return {"image": pictures[0], **most} if len(pictures) == 1 else {"images": pictures, **most}
    if args.audio:
        return {"audio": base64.b64encode(_read(args.audio)).decode(), **most}
    if args.ids is not None:
        try:
            return {"ids": [int(part) for part in args.ids.split(",")], **most}
        except ValueError as exc:
            raise ConfigError(f"--ids takes whole numbers separated by commas ({exc})") from exc
    from hepti_mqtt.client.described import random_input

    return {**random_input(spec, args.tokens, args.seed), **most}


def stream(hepti: Hepti, args: argparse.Namespace, body: Mapping[str, Any]) -> Answer:
    """Send the request of a decoder and print its tokens as they come; return the whole answer."""
    limits = {"deadline_ms": args.deadline_ms, "timeout_s": args.timeout}
    tokens = hepti.generate(args.model, **body, **pin_arguments(args), report=True, **limits)
    texts = 0  # a text that is tried again begins again
    while True:
        try:
            token = next(tokens)
        except StopIteration as end:
            answer: Answer = end.value
            output.print_text("\n" if texts < 2 else f"\n{answer.generated}\n")
            return answer
        texts += token["index"] == 0
        output.print_text(f"\n{token['text']}" if token["index"] == 0 and texts > 1 else token["text"])


def send_repeatedly(
    hepti: Hepti,
    model: str,
    body: Mapping[str, Any],
    pinned: Mapping[str, Any],
    repeat: int,
    timeout: float,
    deadline_ms: int | None = None,
) -> list[Answer]:
    """Send the request `repeat` times, one after the other; the first may wait for a plan and is not timed."""
    if repeat > 1:
        hepti.infer(model, **body, **pinned, timeout_s=timeout)
    ask = partial(hepti.infer, model, **body, **pinned, report=True, deadline_ms=deadline_ms, timeout_s=timeout)
    return [ask() for _ in range(repeat)]


def check(
    hepti: Hepti, args: argparse.Namespace, body: Mapping[str, Any], directory: str | Path | None, spec: Spec
) -> float:
    """Return the largest |difference| of final hidden states from the NumPy reference, computed here.

    spec: of the model that answers; raises ConfigError where the directory is of another one, or missing.
    """
    from hepti_mqtt.checkpoint import Checkpoint, model_parts
    from hepti_mqtt.service.requests import reader_of

    directory = None if directory is None else Path(directory).expanduser()
    if directory is None or not directory.exists():  # a file of ONNX, too
        raise ConfigError(
            f"--check needs the model's files on this machine; {directory} is not here: name them with --model-dir DIR"
        )
    request = {**body, "want": "hidden"}
    hidden = hepti.infer(args.model, **request, **pin_arguments(args), timeout_s=args.timeout).hidden
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(Checkpoint.open(directory, args.model, p)) for p in model_parts(directory)]
        if _as_numbers(spec) not in [_as_numbers(spec_from_dict(each.spec.to_dict())) for each in checkpoints]:
            raise ConfigError(f"{directory} is not the model that answered; name its files with --model-dir DIR")
        return max_abs_err(checkpoints[reader_of(checkpoints, body)], body, hidden)


def _as_numbers(spec: Spec) -> Spec:
    """Return the spec of the same model with all numbers in f32: they may be narrower where it answers."""
    return replace(spec, storages=(), cache="f32") if isinstance(spec, ModelSpec) else spec


def max_abs_err(checkpoint: Checkpoint, body: Mapping[str, Any], hidden: NDArray[np.float32]) -> float:
    """Return the largest |difference| between `hidden` and the reference's final hidden states for a request.

    Raises ConfigError where the checkpoint is of another model than answered.
    """
    from hepti_mqtt.client.described import reference

    try:
        expected = reference(checkpoint, body)
        if expected.shape != hidden.shape:
            raise ValueError(f"its hidden states are {list(expected.shape)}, the answer's {list(hidden.shape)}")
    except (HeptiError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{checkpoint.path} is not the model that answered ({error}); name its files with --model-dir DIR"
        ) from error
    return float(np.abs(hidden - expected).max())


def summary(model: str, answers: Sequence[Answer], error: float | None) -> dict[str, Any]:
    """Return the object that `hepti infer --json` prints."""
    last = answers[-1].raw
    latencies = [a.latency_ms for a in answers]
    text = json.dumps(last["result"], sort_keys=True)
    p95 = sorted(latencies)[max(-(-len(latencies) * 95 // 100) - 1, 0)]
    figures = {"median": statistics.median(latencies), "p95": p95, "min": min(latencies), "all": latencies}
    kept = ("compute_ms", "wait_ms", "bytes_on_wire", "predicted_bytes", "predicted_ms")
    result: dict[str, Any] = {"model": model, "plan": last["plan"], "tokens": last["tokens"], "latency_ms": figures}
    result |= {key: last[key] for key in kept}
    result["expected_ms"] = last.get("expected_ms", last["predicted_ms"])  # a planner may be older
    if len(text) <= 20_000:
        result["output"] = last["result"]
    else:
        result["output_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    if error is not None:
        result["max_abs_err"] = error
    return result


def format_result(result: Any, terminal: bool) -> str:
    """Return a result for people, or as JSON in one line where no terminal is."""
    if not terminal:
        return json.dumps(result, ensure_ascii=False)
    return "\n".join(_short_lines("", result))


def _short_lines(name: str, value: Any) -> Iterator[str]:
    """Yield a line per entry: of vectors their length, norm and first numbers; of long texts their beginning."""
    label = f"{name}: " if name else ""
    if isinstance(value, Mapping) and value.keys() == {"dtype", "shape", "base64"}:
        yield f"{name} {value['shape']}: {_vector(np.frombuffer(base64.b64decode(value['base64']), '<f4'))}"
    elif isinstance(value, Mapping) and not all(isinstance(item, Mapping | list) for item in value.values()) and name:
        yield label + ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _short_lines(f"{name}.{key}" if name else key, item)
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for number, item in enumerate(value, 1):
            yield from _short_lines(f"{name} {number}".strip(), item)
    else:
        yield label + _short(value)


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= LONG_TEXT else f"{value[:FEW_CHARACTERS]} ... ({len(value)} characters)"
    if isinstance(value, list) and len(value) > LONG_VECTOR and all(isinstance(n, int | float) for n in value):
        return _vector(np.asarray(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _vector(numbers: NDArray[Any]) -> str:
    first = ", ".join(f"{number:.4f}" for number in numbers[:FEW_NUMBERS])
    return f"{first}, ... ({numbers.size} numbers, norm {np.linalg.norm(numbers):.4f})"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc


def _print(answer: Answer, result: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Print the result, then on stderr its time and plan. record: of the model's plans."""
    plan = result["plan"]
    shares = ", ".join(f"{d} {100 * s:.0f} %" for d, s in plan["devices"].items())
    name = "/".join([plan["strategy"], *plan["options"].values()])
    sent = f"{result['tokens']} tokens, {output.size(result['bytes_on_wire'] or 0)} sent"
    predicted = f"expected {output.predicted(record, plan['devices'], result['expected_ms'])} ms"
    if answer.result is None:
        took = f"the plan was up after {result['latency_ms']['median'] / 1e3:.1f} s; {predicted}, {sent}"
    else:
        output.print_lines([format_result(answer.result, output.out.is_terminal)])
        took = f"{result['latency_ms']['median']:.1f} ms ({predicted}), {sent}"
    moved = plan.get("weight_error")  # a planner may be older
    kept = plan["weights"] if moved is None else f"{plan['weights']} (by which answers move by {moved:.1e} of them)"
    lines = [
        took,
        f"plan {plan['id']}: {name} on {shares}; weights {kept}, wire {plan['wire']}, route {plan['route']}",
    ]
    if "max_abs_err" in result:
        lines.append(f"largest difference from the single-device reference: {result['max_abs_err']:.2e}")
    for line in lines:
        output.err.print(line, markup=False)
