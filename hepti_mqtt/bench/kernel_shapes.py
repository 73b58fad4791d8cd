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
from hepti_mqtt.plan_programs import lowered, make_plan, short_programs
from hepti_mqtt.program import Compute
from hepti_mqtt.spec import RequestShape
from hepti_mqtt.strategies import STRATEGIES

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
def shapes(models: tuple[str, ...] = MODELS) -> tuple[Shape, ...]:
    """Return every distinct shape of the models, sorted: 1 to 8 equal devices, every way that a planner may choose."""
    weights: Counter[tuple[int, int, int]] = Counter()
    for kind in models:
        spec = encoder(spec_of_kind(kind))
        for tokens in (spec.max_tokens,) if spec.image else TEXT_TOKENS:
            for plan in _plans(spec, shape := shape_for(spec, tokens)):
                weights.update(flops_of(spec, plan, shape))
    return tuple(Shape(*mnk, float(flops)) for mnk, flops in sorted(weights.items()) if flops)


def flops_of(spec: ModelSpec, plan: Plan, shape: RequestShape) -> Counter[tuple[int, int, int]]:
    """Return the FLOPs of every matmul [m, k] @ [k, n] of a plan's Programs, by (m, n, k); layers alike are one."""
    flops: Counter[tuple[int, int, int]] = Counter()
    layer, times = lowered(spec, plan, shape).repeated or (-1, 1)
    for program in short_programs(spec, plan, shape).values():
        for op in program.ops:
            for work in works(op, program.slots) if isinstance(op, Compute) else ():
                if work.kind == "linear":
                    flops[work.rows, work.n, work.k] += int(work.flops) * (times if op.layer == layer else 1)
    return flops


def _plans(spec: ModelSpec, shape: RequestShape) -> Iterator[Plan]:
    whole = graph(spec, shape)
    for strategy in (s for s in STRATEGIES.values() if s.offered and s.unsupported(whole) is None):
        for options in strategy.options:
            for count in range(1, 1 + (strategy.most_devices or MOST_DEVICES)):
                devices = tuple(f"d{i}" for i in range(count))
                template = Plan("bench", Epoch(1, 1), strategy.name, devices, devices[0])
                yield make_plan(spec, template, strategy.name, options, [1.0] * count)
