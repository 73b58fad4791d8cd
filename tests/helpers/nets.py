"""Graphs of small CNNs with seeded weights, divided by methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from small_cnns import Node, cnn, conv, pool, relu
from together import run_programs

from hepti_mqtt import models
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.lowering.graph import Graph
from hepti_mqtt.lowering.lower import Lowered
from hepti_mqtt.shares import DeviceResources
from hepti_mqtt.strategies import STRATEGIES, Division
from hepti_mqtt.strategies.plan_programs import base_table

Line = tuple[str, int, int] | str  # ("conv", channels, size), ("stride", channels, size), "pool", "residual"


def net(side: int, lines: Sequence[Line], dense: Sequence[int] = (40,)) -> Graph:
    """Return a graph of one picture; a "residual" adds the map before the last two to the last one."""
    nodes, maps = list[Node](), ["image"]
    for number, line in enumerate(lines):
        name = f"{number}.pool" if line == "pool" else f"{number}.map"
        if line == "pool":
            nodes.append({**pool(2, 2, 2), "name": name})
        elif line == "residual":
            nodes += [{"op": "add", "name": f"{number}.sum", "inputs": [maps[-3], maps[-1]]}, relu(name=name)]
        else:
            kind, channels, size = line
            stride = [2, 2] if kind == "stride" else [1, 1]
            nodes += [conv(size, size // 2, channels, name=f"{number}.conv", stride=stride), relu(name=name)]
        maps.append(name)
    spec = cnn(side, *nodes, columns=dense)
    return models.graph(spec, models.representative_shape(spec, 1, 1))


# Pools, a residual, strides, and a window of seven rows on maps of six and three.
VGG = net(24, [("conv", 8, 3), "pool", ("conv", 8, 3), ("conv", 8, 3), "residual", "pool", ("conv", 8, 7)], (40, 300))


def tensors(graph: Graph) -> dict[str, np.ndarray]:
    """Return the weights of a graph, of a size that keeps maps near 1."""
    rng, arrays = np.random.default_rng(5), {}
    for op in graph.ops:
        for ref in op.weight_refs(op.full_region) if op.tensors else ():
            shape = (ref.rows[1], ref.columns[1]) if ref.layout != "plain" else (ref.columns[1],)
            arrays[ref.tensor] = (rng.standard_normal(shape) * (2 / shape[0]) ** 0.5).astype(np.float32)
    return arrays


def divided(
    graph: Graph,
    method: str,
    speeds: Sequence[float],
    options: Mapping[str, str] | None = None,
    resources: Sequence[DeviceResources] = (),
    head: int = 0,
) -> Lowered:
    """Return what a graph becomes under a method, on devices d0, d1, ... of given speeds and links."""
    names, chosen = tuple(f"d{i}" for i in range(len(speeds))), dict(options or {})
    weights, ranges = STRATEGIES[method].make_shares(graph, chosen, speeds, resources)
    plan = Plan("m", PlanVersion(1, 1), method, names, names[head], chosen, weights, ranges)
    division = Division(graph, plan)
    return Lowered(graph, STRATEGIES[method].table(division).with_defaults(base_table(division)), names)


def run(lowered: Lowered, held: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the answer to one seeded picture."""
    shape = lowered.graph.by_name["pixels"].space
    pixels = np.random.default_rng(9).integers(0, 256, shape, dtype=np.uint8)
    return run_programs({name: lowered.full_program(name) for name in lowered.names}, held, pixels)
