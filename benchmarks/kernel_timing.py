"""The matmul shapes that devices get, and the timing of contenders that alternate within one round."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Final, NamedTuple

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import Compute
from hepti_mqtt.core.spec import RequestShape
from hepti_mqtt.kernels import works
from hepti_mqtt.models import graph, representative_shape, require_transformer
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import compact_programs, lower_plan, make_plan

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
        spec = require_transformer(spec_of_kind(kind))
        for tokens in (spec.max_tokens,) if spec.image else TEXT_TOKENS:
            for plan in _plans(spec, shape := representative_shape(spec, tokens)):
                weights.update(flops_of(spec, plan, shape))
    return tuple(Shape(*mnk, float(flops)) for mnk, flops in sorted(weights.items()) if flops)


def flops_of(spec: ModelSpec, plan: Plan, shape: RequestShape) -> Counter[tuple[int, int, int]]:
    """Return the FLOPs of every matmul [m, k] @ [k, n] of a plan's Programs, by (m, n, k); layers alike are one."""
    flops: Counter[tuple[int, int, int]] = Counter()
    layer, times = lower_plan(spec, plan, shape).repeated_layer or (-1, 1)
    for program in compact_programs(spec, plan, shape).values():
        for op in program.ops:
            for work in works(op, program.slots) if isinstance(op, Compute) else ():
                if work.kind == "linear":
                    flops[work.rows, work.n, work.k] += int(work.flops) * (times if op.layer == layer else 1)
    return flops


def _plans(spec: ModelSpec, shape: RequestShape) -> Iterator[Plan]:
    whole = graph(spec, shape)
    for strategy in (s for s in STRATEGIES.values() if s.automatic and s.why_unsupported(whole) is None):
        for options in strategy.options:
            for count in range(1, 1 + (strategy.max_devices or MOST_DEVICES)):
                devices = tuple(f"d{i}" for i in range(count))
                template = Plan("bench", PlanVersion(1, 1), strategy.name, devices, devices[0])
                yield make_plan(spec, template, strategy.name, options, [1.0] * count)


Contender = Callable[[], object]

# A sample repeats a short call until it takes this long: the clock and the call's overhead must not show.
SAMPLE_S: Final = 2e-3


def interleaved(
    contenders: Mapping[str, Contender], rounds: int, pause_s: float = 0.0, sample_s: float = SAMPLE_S
) -> dict[str, list[float]]:
    """Return the seconds per call of every contender in every round; each is warmed up before.

    The order turns by one place per round, so that nobody always runs behind the same neighbour. Before its sample a
    contender runs once unmeasured: what the neighbour left in the caches is not its own. pause_s: before that, so that
    the neighbour's idle threads spin no longer. sample_s: how long a sample takes at least; a tenth of it, and one call
    at least, runs before.
    """
    names = list(contenders)
    times = {name: _calls(contenders[name], sample_s) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            time.sleep(pause_s)
            _clock(contenders[name], 1 + times[name] // 10)
            samples[name].append(_clock(contenders[name], times[name]))
    return samples


def _calls(contender: Contender, sample_s: float) -> int:
    contender()
    contender()
    return max(1, round(sample_s / max(_clock(contender, 1), 1e-7)))


def _clock(contender: Contender, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        contender()
    return (time.perf_counter() - start) / times
