"""A Program without peers runs here to its end; one with peers says that it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from sites import FAMILIES, TOLERANCE, plan, request, tensors

from hepti_mqtt import models
from hepti_mqtt.kernels import Workers
from hepti_mqtt.plan_programs import program
from hepti_mqtt.runtime.worker.executor import run_local


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threads", [1, 2])
def test_one_device_here_is_the_reference(family, threads):
    spec = FAMILIES[family]
    shape, inputs = request(spec, (7, 5))
    alone = program(spec, plan(spec, ("single", {}), (1.0,)), shape, "d0")
    workers = Workers(threads)
    try:
        got = run_local(alone, tensors(spec), inputs, workers)
    finally:
        workers.close()
    np.testing.assert_allclose(got, models.reference(spec, tensors(spec), inputs, shape)[1], atol=TOLERANCE)


def test_a_program_with_peers_cannot_run_alone():
    spec = FAMILIES["bert-embedding"]
    shape, inputs = request(spec, (7,))
    half = program(spec, plan(spec, ("block", {}), (1.0, 1.0)), shape, "d0")
    with pytest.raises(ValueError, match="cannot run alone"):
        run_local(half, tensors(spec), inputs)
