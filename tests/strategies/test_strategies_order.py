"""Both orders of the products around attention give the answer of one device, by either route."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from programs_run import run_programs
from sites import EVERY_FAMILY, FAMILIES, TOLERANCE, plan, request, tensors

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.models.shapes import Text
from hepti_mqtt.plan_programs import programs, programs_digest
from hepti_mqtt.program import Compute

SPECS = {**FAMILIES, "tiny-debert": EVERY_FAMILY["tiny-debert"], "tiny-devit": spec_of_kind("tiny-devit")}
SHARES = ((1.0,), (1.0, 2.0), (0.0, 1.0, 3.0), (1.0,) * 4, (1.0, 0.5, 2.0, 1.0, 1.0))


def kernels(parts):
    return {op.kernel for p in parts.values() for op in p.ops if isinstance(op, Compute)}


@pytest.mark.parametrize("family", SPECS)
def test_every_order_is_within_the_tolerance_of_the_reference_on_one_to_five_devices(family):
    spec = SPECS[family]
    held = tensors(spec)
    for weights in SHARES:
        for lengths in ((13,), (5, 7, 3)) if isinstance(spec.reads, Text) else ((1,),):
            for want in ("task", "hidden"):
                shape, inputs = request(spec, lengths, want)
                wanted = models.reference(spec, held, inputs, shape)[want == "task"]
                for order in ({}, {"order": "kept"}, {"order": "reordered"}):
                    fixed = plan(spec, ("voltage", {"shares": "uneven", **order}), weights)
                    parts = programs(spec, fixed, shape)
                    got = run_programs(parts, held, inputs)
                    np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=1e-5)
                    if order:
                        assert ("attention_reordered" in kernels(parts)) == (order["order"] == "reordered")


@pytest.mark.parametrize("wire", ["f32", "f16", "i8"])
def test_the_bits_do_not_depend_on_the_route(wire):
    spec = FAMILIES["bert-embedding"]
    fixed = replace(plan(spec, ("voltage", {"shares": "uneven", "order": "reordered"}), (1.0, 2.0, 1.0)), wire=wire)
    shape, inputs = request(spec, (13, 4))
    mesh = replace(fixed, route="mesh", relayed=(("d0", "d1"),))
    by_broker, direct = (run_programs(programs(spec, p, shape), tensors(spec), inputs) for p in (fixed, mesh))
    assert np.array_equal(by_broker, direct)
    assert programs_digest(spec, mesh) == programs_digest(spec, fixed)


def test_planner_and_devices_know_orders_apart():
    spec = FAMILIES["bert-embedding"]
    kept, other = (
        programs_digest(spec, plan(spec, ("voltage", {"shares": "equal", "order": order}), (1.0, 1.0)))
        for order in ("kept", "reordered")
    )
    assert kept != other
