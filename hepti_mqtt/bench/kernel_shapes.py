"""The matmul shapes that devices get: read off the Programs of every strategy, with the FLOPs behind each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import works
from hepti_mqtt.models import encoder, graph, shape_for
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, programs
from hepti_mqtt.program import Compute
from hepti_mqtt.spec import RequestShape
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.work import Work

MODELS: Final = ("bert-base", "bert-large", "vit-base", "vit-large", "minilm")
TEXT_TOKENS: Final = (128, 384)
MOST_DEVICES: Final = 8


class Shape(NamedTuple):
    """A matmul [m, k] @ [k, n]; `weight` is the FLOPs of all ops of this shape in all Programs."""

    m: int
    n: int
    k: int
    weight: float

    @property
    def flops(self) -> float:
        """Return the floating-point operations of one such matmul."""
        return 2.0 * self.m * self.n * self.k


@cache
def shapes() -> tuple[Shape, ...]:
    """Return every distinct shape of MODELS, sorted: 1 to 8 equal devices, every way that a planner may choose."""
    weights: Counter[tuple[int, int, int]] = Counter()
    for kind in MODELS:
        spec = encoder(spec_of_kind(kind))
        for tokens in (spec.max_tokens,) if spec.image else TEXT_TOKENS:
            for work in _linear_work(spec, shape_for(spec, tokens)):
                weights[work.rows, work.n, work.k] += int(work.flops)
    return tuple(Shape(*mnk, float(flops)) for mnk, flops in sorted(weights.items()) if flops)


def _linear_work(spec: ModelSpec, shape: RequestShape) -> Iterator[Work]:
    for plan in _plans(spec, shape):
        for program in programs(spec, plan, shape).values():
            for op in program.ops:
                if isinstance(op, Compute):
                    yield from (work for work in works(op, program.slots) if work.kind == "linear")


def _plans(spec: ModelSpec, shape: RequestShape) -> Iterator[Plan]:
    whole = graph(spec, shape)
    for strategy in (s for s in STRATEGIES.values() if s.offered and s.unsupported(whole) is None):
        for options in strategy.options:
            for count in range(1, 1 + (strategy.most_devices or MOST_DEVICES)):
                devices = tuple(f"d{i}" for i in range(count))
                template = Plan("bench", Epoch(1, 1), strategy.name, devices, devices[0])
                yield make_plan(spec, template, strategy.name, options, [1.0] * count)
