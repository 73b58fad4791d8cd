"""Narrow wire dtypes within an accuracy budget: measured errors are those of devices, and plans keep the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from questions import cluster, device, question
from sites import EVERY_FAMILY, FAMILIES, METHODS, plan, request, served, tensors
from together import bound, run_together

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.config.options import MAX_WEIGHT_ERROR
from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.core.plan import NARROW_WIRE_DTYPES
from hepti_mqtt.models import representative_shape
from hepti_mqtt.planner import Question, decide_within_accuracy, weight_error, wire_errors
from hepti_mqtt.planner.candidates import MARGIN
from hepti_mqtt.runtime.coordinator.interface import Solve
from hepti_mqtt.service.solver import MeasuredErrors, solve
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs

SPEC = FAMILIES["bert-embedding"]
TENSORS = tensors(SPEC)


def question_for(**pins) -> Question:
    """Return a question about two devices on links so slow that narrow wire dtypes pay."""
    slow = cluster(device("d0", 20.0), device("d1", 20.0), mbit=1.0)
    pins = {"strategy": "row", "options": {"variant": "kv"}, "devices": ("d0", "d1")} | pins
    return question(SPEC, slow, representative_shape(SPEC, 16), **pins)


def decided(errors=None, site=None, **pins):
    """Return the plan within a budget, and the plans of which errors were measured."""
    measured, query = [], question_for(**pins)

    def measure(plan):
        measured.append(plan)
        return wire_errors(SPEC, plan, TENSORS)

    query = query if site is None else replace(query, cluster=site)
    return decide_within_accuracy(query, {} if errors is None else errors, measure).chosen.plan, measured


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("bert-embedding", ("row", {"variant": "kv"})),
        ("vit-classifier", ("block", {})),
        ("tiny-convnet", ("map_rows", {"cut": "none"})),
        *(
            pytest.param("bert-mask", method, marks=pytest.mark.nightly)
            for method in METHODS
            if STRATEGIES[method[0]].groups is None and STRATEGIES[method[0]].max_devices is None
        ),
    ],
    ids=str,
)
def test_what_devices_answer_is_within_a_budget_that_allows_the_wire(family, method):
    """The input differs from the measured ones, and kernels are compiled."""
    spec = EVERY_FAMILY[family]
    held, fixed = tensors(spec), plan(spec, method, (1.0, 2.0, 1.0))
    errors = wire_errors(spec, fixed, held)
    for want in ("task", "hidden"):
        shape, inputs = request(spec, served(spec, (9, 7)), want, seed=99)
        exact, *others = (
            run_together(bound(device_programs(spec, replace(fixed, wire=wire), shape), held), inputs)
            for wire in ("f32", *NARROW_WIRE_DTYPES)
        )
        for wire, answer in zip(NARROW_WIRE_DTYPES, others, strict=True):
            error = np.linalg.norm(answer - exact) / np.linalg.norm(exact)
            assert 0 < error <= MARGIN * errors[wire], (want, wire)


def test_the_budget_chooses_the_dtype_and_the_plan_says_the_error():
    f32, nothing = decided(accuracy=1e-6)
    assert (f32.wire, f32.wire_error, len(nothing)) == ("f32", None, 1)
    f16, _ = decided(accuracy=1e-3)
    assert f16.wire == "f16"
    assert 0 < f16.wire_error * MARGIN <= 1e-3
    i8, _ = decided(accuracy=0.05)
    assert i8.wire == "i8"
    assert 1e-3 < i8.wire_error * MARGIN <= 0.05
    assert f16.predicted_s > i8.predicted_s
    assert f32.predicted_s > f16.predicted_s


def test_without_a_budget_nothing_is_measured_and_what_is_pinned_is_kept():
    for wire in ("f32", *NARROW_WIRE_DTYPES):
        chosen, measured = decided(wire=wire)
        assert (chosen.wire, chosen.wire_error, measured) == (wire, None, [])


def test_an_error_is_measured_once_for_all_searches():
    errors = {}
    first, measured = decided(errors, accuracy=1e-3)
    assert len(measured) == 1
    again, measured = decided(errors, accuracy=1e-3)
    assert (again, measured) == (first, [])
    assert {key[2] for key in errors} == set(NARROW_WIRE_DTYPES)


def side_by_side(accuracy: float, *gflops: float):
    """Return the plan of two replicas on slow links, the errors by key, and the measured plans."""
    slow = cluster(*(device(f"d{i}", speed) for i, speed in enumerate(gflops)), mbit=1.0)
    pins = {"strategy": "replicas", "options": {"groups": "2"}, "devices": None, "objective": "throughput"}
    errors = {}
    chosen, measured = decided(errors, slow, accuracy=accuracy, **pins)
    return chosen, errors, measured


def test_a_replica_of_two_devices_beside_a_faster_one_alone_is_measured():
    exact, errors, measured = side_by_side(1e-6, 0.02, 0.006, 0.006)
    assert [(len(part.devices), part.wire) for part in exact.replicas] == [(1, "f32"), (2, "f32")]
    assert {key[:2] for key in errors} == {(part.method, 2) for part in measured}
    assert not any(part.replicas for part in measured)
    assert min(errors.values()) > 0, "a narrow wire that was compared with itself would move nothing"
    narrow, _, _ = side_by_side(0.05, 0.02, 0.006, 0.006)
    assert [part.wire for part in narrow.replicas] == ["f32", "i8"]
    assert narrow.wire_error == narrow.replicas[1].wire_error > 0
    assert narrow.wire == "i8", "the whole plan names the narrowest"


def test_an_error_does_not_depend_on_a_device_that_has_next_to_nothing():
    """Where no row of a short request is its own it exchanges nothing, and no wire would move anything."""
    alike, least = (plan(SPEC, ("row", {"variant": "kv"}), (1.0, share)) for share in (1.0, 1e-3))
    assert wire_errors(SPEC, least, TENSORS) == wire_errors(SPEC, alike, TENSORS)


@pytest.mark.parametrize(
    ("kind", "method"), [("tiny-gpt2", ("decoder", {})), ("tiny-whisper", ("row", {"variant": "kv"}))]
)
def test_what_a_session_begins_with_is_measured(kind, method):
    spec = spec_of_kind(kind)
    errors = wire_errors(spec, plan(spec, method, (1.0, 1.0)), tensors(spec))
    assert 0 < errors["f16"] < errors["i8"] < 0.1


def test_numbers_that_f16_cannot_say_leave_f32():
    huge = dict(TENSORS)
    huge["layers.1.value.bias"] = huge["layers.1.value.bias"] + np.float32(1e6)
    errors = wire_errors(SPEC, plan(SPEC, ("row", {"variant": "kv"}), (1.0, 1.0)), huge)
    assert errors["f16"] == float("inf")
    decision = decide_within_accuracy(question_for(accuracy=1e-3), {}, lambda plan: wire_errors(SPEC, plan, huge))
    assert decision.chosen.plan.wire == "f32"


def with_outliers(held):
    """Return tensors in which one row in a hundred of each matrix has a large weight, as some checkpoints have."""
    tensors_with_outliers = {name: array.copy() for name, array in held.items()}
    for name, array in tensors_with_outliers.items():
        if array.ndim == 2 and name.startswith("layers."):
            array[::100] *= 60
    return tensors_with_outliers


@pytest.mark.parametrize(
    ("family", "dtype"), [("bert-embedding", "w8a8"), ("vit-classifier", "f16"), ("vit-classifier", "w8a32")]
)
def test_the_error_of_narrow_weights_is_that_of_the_kernels(family, dtype):
    spec = EVERY_FAMILY[family]
    held, alone = tensors(spec), plan(spec, ("single", {}), (1.0,))
    measured = weight_error(spec, held, dtype)
    shape, inputs = request(spec, served(spec, (9, 7)), "task", seed=99)
    exact, narrow = (
        run_together(bound(device_programs(spec, replace(alone, weight_dtype=each), shape), held), inputs)
        for each in ("f32", dtype)
    )
    error = np.linalg.norm(narrow - exact) / np.linalg.norm(exact)
    assert error / 3 < measured < error * 3 + 1e-6


def test_narrow_weights_that_move_answers_too_far_are_refused_unless_that_is_accepted(tmp_path):
    kept = tmp_path / "errors.json"
    asking = Solve("m", 1, question_for(weight_dtype="w8a8"), None)
    fine = solve(asking, MeasuredErrors(SPEC, TENSORS, kept))
    assert fine.decision is not None
    assert 0 < fine.decision.chosen.plan.weight_error < MAX_WEIGHT_ERROR
    assert MeasuredErrors(SPEC, {}, kept).weights == {"w8a8": fine.decision.chosen.plan.weight_error}
    outliers = with_outliers(TENSORS)
    refused = solve(asking, MeasuredErrors(SPEC, outliers))
    assert isinstance(refused.error, PlanError)
    accepted = solve(asking, MeasuredErrors(SPEC, outliers, max_weight_error=1.0))
    assert accepted.decision is not None
    assert accepted.decision.chosen.plan.weight_error > MAX_WEIGHT_ERROR
    whole = solve(replace(asking, question=question_for()), MeasuredErrors(SPEC, {}))
    assert whole.decision.chosen.plan.weight_error is None
