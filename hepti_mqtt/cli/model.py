"""`hepti model`: make, inspect or verify a model directory. Only `verify` computes, so only it imports kernels."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from math import prod

import numpy as np

from hepti_mqtt import models
from hepti_mqtt.checkpoint import KINDS, Checkpoint, make_model, model_parts
from hepti_mqtt.cli import output
from hepti_mqtt.config.settings import nearest
from hepti_mqtt.core.errors import ConfigError, HeptiError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan


def model(args: argparse.Namespace) -> int:
    """Make, inspect or verify a model directory."""
    if args.action == "make":
        return _make(args)
    for part in model_parts(args.directory):
        (_inspect if args.action == "inspect" else _verify)(args, part)
    return 0


def near_kinds(name: str) -> str:
    """Return the end of an error about an unknown kind: the nearest one, or all of real size."""
    kinds = [kind for kind in KINDS if not kind.startswith("tiny-")]
    return nearest(name, kinds) or f"; kinds: {', '.join(kinds)}"


def _make(args: argparse.Namespace) -> int:
    if args.kind not in KINDS:
        raise ConfigError(f"there is no kind {args.kind!r}{near_kinds(args.kind)}")
    path = make_model(args.kind, args.out, args.seed, args.layers)
    nbytes = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    result = {"directory": str(path), "kind": args.kind, "seed": args.seed, "bytes": nbytes}
    said = f"wrote {path} ({nbytes / output.MIB:.1f} MiB, {args.kind}, seed {args.seed})"
    output.print_result(args.json, result, [said])
    return 0


def _inspect(args: argparse.Namespace, part: str) -> None:
    from hepti_mqtt.service.requests import forms

    with Checkpoint.open(args.directory, part=part, weights=args.weights) as checkpoint:
        spec = checkpoint.spec
        sources = models.tensor_sources(spec)
        parameters = sum(prod(s.shape) for s in sources)
        result = {
            **spec.to_dict(),
            "parameters": parameters,
            "tensors": len(sources),
            "requests": [" and ".join(form) for form in forms(checkpoint)],
            "defaults": _listed(checkpoint.sampling_defaults) if spec.head.task == "generation" else None,
            "widened": ", ".join(f"{name} to {wider}" for name, wider in sorted(checkpoint.widened.items())) or None,
            "quantised": None if checkpoint.quantisation is None else checkpoint.quantisation.text(),
        }
    if args.json:
        output.print_json(result)
    else:
        output.print_table(
            " ".join(filter(None, (str(args.directory), part))),
            ("what", "value"),
            sorted((k, v) for k, v in result.items() if v is not None),
        )


def _listed(options: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in options.items()) or "the likeliest token follows"


def _verify(args: argparse.Namespace, part: str) -> None:
    """Run one request through kernels and reference; raises HeptiError if they differ."""
    from hepti_mqtt.kernels.jit import release_compiler
    from hepti_mqtt.runtime.worker.executor import run_local
    from hepti_mqtt.strategies.plan_programs import device_program, make_plan

    with Checkpoint.open(args.directory, part=part, weights=args.weights) as checkpoint:
        spec, tensors = checkpoint.spec, checkpoint.tensors(banded=True)
        shape = models.representative_shape(spec, 32).with_want("hidden")
        if shape.session_rows and shape.size == 1:  # a decoder's step; its prompt says more
            shape = shape.decode_step(min(32, shape.session_rows))
        inputs = models.random_inputs(spec, shape, np.random.default_rng(0))
        expected, _ = models.reference(spec, tensors, inputs, shape)
        alone = make_plan(spec, Plan("model", PlanVersion(1, 1), "single", ("here",), "here"), "single", {}, (1.0,))
        program, tiles = device_program(spec, alone, shape, "here"), checkpoint.tiles(np.unique(inputs))
        got = run_local(program, tiles, inputs, release=release_compiler)
        quantisation, cosine = checkpoint.quantisation, 0.0
        if quantisation is not None:
            both = (tensors, checkpoint.tensors_as_stored(banded=True))
            now, before = (models.reference(spec, each, inputs, shape.with_want("task"))[1] for each in both)
            cosine = float(np.sum(now * before) / np.linalg.norm(now) / np.linalg.norm(before))
    error = float(np.abs(got - expected).max() / max(1.0, float(np.abs(expected).max())))
    if not error < 2e-4:
        raise HeptiError(
            f"{args.directory}: kernels and reference differ by {error:.2e} (bound 2e-4); please report this"
        )
    result = {"directory": str(args.directory), "tokens": shape.size, "max_abs_err": error}
    lines = [f"{args.directory}: {spec.architecture}, {shape.size} tokens, max |difference| {error:.1e}"]
    if quantisation is not None:
        result["cosine"] = cosine
        lines += [quantisation.text(), f"cosine with the answer before: {cosine:.6f}"]
    output.print_result(args.json, result, lines)
