"""CNNs, built op by op, with seeded weights: what the tests of methods for them run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from together import run_programs

from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.lowering import Graph, GraphBuilder, Lowered, roles
from hepti_mqtt.lowering.ops import Conv, Flatten, MaxPool, Reshape
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import base_table
from hepti_mqtt.shares import DeviceResources
from hepti_mqtt.strategies import STRATEGIES, Division

Line = tuple[str, int, int] | str  # ("conv", channels, size), ("stride", channels, size), "pool", "residual"


def net(side: int, lines: Sequence[Line], dense: Sequence[int] = (40,)) -> Graph:
    """Return a graph of one picture; a "residual" adds the map before the last two to the last one."""
    g = GraphBuilder()
    pixels, half = g.input("pixels", (1, 3, side, side), "u8"), (0.5, 0.5, 0.5)
    rows = g.opaque("rows", (pixels,), roles.STEM, "patchify", (side * side, 3), patch=1, mean=half, std=half)
    reshaped = Reshape(
        name="image", inputs=(rows,), role=roles.STEM, space=(side, side, 3), rank=3, source=(side * side, 3)
    )
    outputs = [g.add_op(reshaped)]
    for number, line in enumerate(lines):
        outputs.append(_layer(g, outputs, line, number))
    height, width, channels = g.shape_of(outputs[-1])
    size = height * width * channels
    x = g.add_op(
        Flatten(
            name="flat", inputs=(outputs[-1],), role=roles.FLAT, space=(1, size), source=(height, width, channels)
        )
    )  # fmt: skip
    for number, columns in enumerate(dense):
        x = g.linear(f"fc{number}", x, roles.DENSE, {f"fc{number}": columns}, activation="relu")
    g.linear("logits", x, roles.TASK, {"classifier": 7})
    return g.build()


def _layer(g: GraphBuilder, sources: Sequence[str], line: Line, number: int) -> str:
    x = sources[-1]
    height, width, channels = g.shape_of(x)
    if line == "pool":
        space = (height // 2, width // 2, channels)
        pool = MaxPool(
            name=f"{number}.pool", inputs=(x,), role=roles.MAP, space=space, kernel=(2, 2), stride=(2, 2),
            source=(height, width, channels),
        )  # fmt: skip
        return g.add_op(pool)
    if line == "residual":
        return g.activation(f"{number}.map", g.sum(f"{number}.sum", sources[-3], x, roles.MAP_SUM), roles.MAP, "relu")
    kind, n, size = line
    stride = 2 if kind == "stride" else 1
    space = (-(-height // stride), -(-width // stride), n)
    name = f"{number}.conv"
    conv = Conv(
        name=name, inputs=(x,), role=roles.MAP_SUM, tensors=(f"{name}.weight", f"{name}.bias"), space=space,
        kernel=(size, size), stride=(stride, stride), pad=(size // 2,) * 4, source=(height, width, channels),
    )  # fmt: skip
    return g.activation(f"{number}.map", g.add_op(conv), roles.MAP, "relu")


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
    lanes: Sequence[DeviceResources] = (),
    head: int = 0,
) -> Lowered:
    """Return what a graph becomes under a method, on devices d0, d1, ... of given speeds and links."""
    names, chosen = tuple(f"d{i}" for i in range(len(speeds))), dict(options or {})
    weights, ranges = STRATEGIES[method].make_shares(graph, chosen, speeds, lanes)
    plan = Plan("m", PlanVersion(1, 1), method, names, names[head], chosen, weights, ranges)
    division = Division(graph, plan)
    return Lowered(graph, STRATEGIES[method].table(division).with_defaults(base_table(division)), names)


def run(lowered: Lowered, held: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the answer to one seeded picture."""
    shape = lowered.graph.by_name["pixels"].space
    pixels = np.random.default_rng(9).integers(0, 256, shape, dtype=np.uint8)
    return run_programs({name: lowered.full_program(name) for name in lowered.names}, held, pixels)
