"""Nothing is written outside of the arrays of a run: its scratch memory has fences around every array."""

from __future__ import annotations

import numpy as np
import pytest
from sites import EVERY_FAMILY, plan, request, tensors
from together import bound, run_together

from hepti_mqtt import models
from hepti_mqtt.kernels import tape
from hepti_mqtt.runtime.worker import executor
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs

FENCE_BYTES, FENCE = 128, 0xA5


class FencedTape(tape.Tape):
    """Lays arrays out apart from each other, and looks after each run at what lies between them."""

    looks = 0

    def __init__(self, *arguments) -> None:
        self.used: list[tuple[int, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tape, "lay_out", self.lay_out)
            super().__init__(*arguments)

    def lay_out(self, uses):
        offsets, at = {}, FENCE_BYTES
        for key, (_, _, nbytes) in uses.items():
            offsets[key] = at
            self.used.append((at, at + nbytes))
            at += -(-nbytes // 64) * 64 + FENCE_BYTES
        return offsets, at if uses else 0

    def run(self, arrays, scratch, *arguments):
        fences = np.ones(len(scratch), np.bool_)
        base = -scratch.__array_interface__["data"][0] % 64
        for start, stop in self.used:
            fences[base + start : base + stop] = False
        scratch[fences] = FENCE
        row = super().run(arrays, scratch, *arguments)
        assert (scratch[fences] == FENCE).all()
        FencedTape.looks += bool(self.used)
        return row


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family, spec in EVERY_FAMILY.items()
        for name, method in STRATEGIES.items()
        if method.why_unsupported(models.graph(spec, models.largest_shape(spec))) is None
        and not method.task_count(method.options[0])
    ],
)
def test_no_method_of_a_family_writes_between_its_arrays(family, name, monkeypatch):
    spec, method = EVERY_FAMILY[family], STRATEGIES[name]
    monkeypatch.setattr(executor, "Tape", FencedTape)
    shares = (1.0,) if method.max_devices == 1 else (1.0, 1.0)
    shape, inputs = request(spec, (5,))
    parts = device_programs(spec, plan(spec, (name, method.options[0]), shares).executables[0], shape)
    looks = FencedTape.looks
    run_together(bound(parts, tensors(spec)), inputs)
    assert FencedTape.looks > looks
