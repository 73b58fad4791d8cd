"""Compiled code exchanges over real sockets what Python has exchanged before, and leaves to Python all else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from exchanging import Site
from sites import EVERY_FAMILY, plan, request, tensors
from together import bound, run_together

from hepti_mqtt import models
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.plan_programs import device_programs
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.transport.mesh import mesh_possible

pytestmark = pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")
LEARNING = 2  # runs: Python checks frames in the first one, and knows their exchanges in the second


def programs(family: str, name: str, devices: int = 2, lengths: tuple[int, ...] = (5,)):
    spec, method = EVERY_FAMILY[family], STRATEGIES[name]
    shape, inputs = request(spec, lengths)
    made = plan(spec, (name, method.options[0]), (1.0,) * devices)
    made = replace(made, route="mesh").executables[0]
    parts = device_programs(spec, made, shape)
    # Each device has a pool of its own: it is made for one thread.
    return {name: bound({name: part}, tensors(spec))[name] for name, part in parts.items()}, inputs


def cases():
    for family, spec in EVERY_FAMILY.items():
        for name, method in STRATEGIES.items():
            of_family = method.why_unsupported(models.graph(spec, models.largest_shape(spec))) is None
            if of_family and method.max_devices != 1 and not method.task_count(method.options[0]):
                yield family, name


@pytest.mark.parametrize(("family", "name"), list(cases()))
def test_each_method_answers_as_without_sockets(family, name):
    made, inputs = programs(family, name)
    expected = run_together(made, inputs)
    with Site(made) as site:
        for run in range(1, LEARNING + 3):
            answers = site.run({run: inputs})
            np.testing.assert_array_equal(answers[run], expected)
        in_line = [device for device in site.devices.values() if device.bound.in_line and device.bound.received]
        assert not JIT or all(device.compiled for device in in_line)
