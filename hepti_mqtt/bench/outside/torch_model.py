"""BERT-like models and ViT in eager PyTorch, whole or with some heads and MLP columns; one thread.

Weights are stored [out, in] as PyTorch's own modules have them, or packed (torch_linear); query, key and value that are
computed from the same rows are one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hepti_mqtt.bench.outside.baselines import TORCH
from hepti_mqtt.bench.outside.common import Options, Task
from hepti_mqtt.errors import ConfigError

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F  # noqa: N812 - its usual name
except ImportError:
    raise ConfigError(f"this baseline needs PyTorch: {TORCH.hint}") from None

from hepti_mqtt.bench.outside.torch_linear import Linear

Tensor = Any
QKV: Final = ("query", "key", "value")
__all__ = ["QKV", "Encoder", "F", "Tensor", "begin", "dist", "leave", "part", "together", "torch", "values"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Encoder:
    """The stem and layers.

    heads and mlp: the half-open ranges that this rank has. together: which of query, key and value share their input.
    """

    def __init__(
        self,
        task: Task,
        options: Options,
        heads: tuple[int, int] | None = None,
        mlp: tuple[int, int] | None = None,
        together: tuple[tuple[str, ...], ...] = (QKV,),
    ) -> None:
        self.spec, self._task, self._packed = task.spec, task, options.packed
        a, f, d = task.spec.heads, task.spec.mlp, task.spec.head_dim
        first, last = heads or (0, a)
        columns, units = slice(first * d, last * d), slice(*(mlp or (0, f)))
        self.heads = last - first
        self._t = {k: torch.from_numpy(np.array(task.tensors[k])) for k in task.tensors if _plain(k)}
        self._linear: list[dict[str, Linear]] = []
        for i in range(task.spec.layers):
            self._linear.append({"+".join(names): self._columns(i, names, columns) for names in together})
            self._linear[i]["attention_out"] = self._rows(i, "attention_out", columns)
            self._linear[i]["mlp_up"] = self._columns(i, ("mlp_up",), units)
            self._linear[i]["mlp_down"] = self._rows(i, "mlp_down", units)

    def _columns(self, i: int, names: tuple[str, ...], columns: slice) -> Linear:
        tensors = self._task.tensors
        weight = np.concatenate([tensors[f"layers.{i}.{name}.weight"][:, columns] for name in names], axis=1)
        bias = np.concatenate([tensors[f"layers.{i}.{name}.bias"][columns] for name in names])
        return Linear(weight, bias, packed=self._packed)

    def _rows(self, i: int, name: str, rows: slice) -> Linear:
        return Linear(self._task.tensors[f"layers.{i}.{name}.weight"][rows], None, packed=self._packed)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return the layer norm `name` of x."""
        weight, bias = self._t[f"{name}.weight"], self._t[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.spec.norm_eps)

    def stem(self, values: Tensor) -> Tensor:
        """Return the embedding [m, h] of token ids or patches."""
        t, text = self._t, self.spec.text
        if text is None:
            x = values @ t["stem.patch.weight"] + t["stem.patch.bias"]
            return torch.cat([t["stem.cls"].reshape(1, -1), x]) + t["stem.position"]
        places = t["stem.position"][text.position_offset : text.position_offset + len(values)]
        return self.norm(t["stem.word"][values] + places + t["stem.type"][0], "stem.norm")

    def layers(
        self,
        x: Tensor,
        attention: Callable[[int, Tensor], Tensor],
        mlp: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """Return x after all layers and the final norm, whatever computes attention and MLP of a layer."""
        for i in range(self.spec.layers):
            first, second = f"layers.{i}.attention_norm", f"layers.{i}.mlp_norm"
            if self.spec.norm_first:
                x = x + attention(i, self.norm(x, first))
                x = x + mlp(i, self.norm(x, second))
            else:
                x = self.norm(x + attention(i, x), first)
                x = self.norm(x + mlp(i, x), second)
        return self.norm(x, "final_norm") if self.spec.norm_first else x

    def project(self, i: int, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        """Return those of Q, K, V [rows, columns of own heads] of x that `names` has, which are stored together."""
        parts: tuple[Tensor, ...] = self._linear[i]["+".join(names)](x).chunk(len(names), dim=-1)
        return parts

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output projection of attention, without its bias: a partial sum if there are other heads."""
        parts = [y.reshape(1, len(y), self.heads, -1).transpose(1, 2) for y in (q, k, v)]
        y = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(len(q), -1)
        return self._linear[i]["attention_out"](y)

    def mlp(self, i: int, x: Tensor) -> Tensor:
        """Return the MLP without its last bias: a partial sum if there are other columns."""
        linear = self._linear[i]
        return linear["mlp_down"](_ACTIVATIONS[self.spec.activation](linear["mlp_up"](x)))

    def bias(self, i: int, part: str) -> Tensor:
        """Return the bias after `attention_out` or `mlp_down`."""
        return self._t[f"layers.{i}.{part}.bias"]


def _plain(name: str) -> bool:
    """Return whether a tensor is used as it is stored: stem, norms, and the biases that follow a sum."""
    kept = ("norm.weight", "norm.bias", "attention_out.bias", "mlp_down.bias")
    return name.startswith("stem.") or name.endswith(kept)


def begin(options: Options, task: Task) -> dict[str, str]:
    """Set one thread and join the group; return versions. Raises ConfigError for ranks that cannot be."""
    torch.set_num_threads(1)
    if not 0 <= options.rank < options.world <= task.spec.heads:
        raise ConfigError(
            f"rank {options.rank} of {options.world} cannot be: use ranks from 0 and at most {task.spec.heads}"
        )
    if options.world > 1:
        method, names = f"tcp://{options.master}", {"rank": options.rank, "world_size": options.world}
        dist.init_process_group("gloo", init_method=method, **names)
    return {"torch": torch.__version__, "numpy": np.__version__}


def together(options: Options) -> Callable[[], None]:
    """Return a barrier of the group."""
    return dist.barrier if options.world > 1 else lambda: None


def leave(options: Options) -> Callable[[], None]:
    """Return what ends the group, so that the process may join another one."""
    return dist.destroy_process_group if options.world > 1 else lambda: None


def part(count: int, rank: int, world: int) -> tuple[int, int]:
    """Return the half-open range of `rank`: nearly equal ones."""
    return rank * count // world, (rank + 1) * count // world


def values(task: Task) -> Tensor:
    """Return the input as PyTorch takes it."""
    return torch.from_numpy(task.values.astype(np.int64) if task.spec.text else task.values)
