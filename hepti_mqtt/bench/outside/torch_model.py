"""BERT-like models and ViT in eager PyTorch, whole or with some heads and MLP columns; one thread.

Weights are stored [out, in] as PyTorch's own modules have them, query, key and value in one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

Tensor = Any
__all__ = ["Encoder", "F", "Tensor", "begin", "dist", "leave", "part", "together", "torch", "values"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Encoder:
    """The stem and layers; heads and mlp: the half-open ranges that this rank has."""

    def __init__(self, task: Task, heads: tuple[int, int] | None = None, mlp: tuple[int, int] | None = None) -> None:
        self.spec, self._task = task.spec, task
        a, f, d = task.spec.heads, task.spec.mlp, task.spec.head_dim
        first, last = heads or (0, a)
        columns, self._units = slice(first * d, last * d), slice(*(mlp or (0, f)))
        self.heads = last - first
        self._t = {k: torch.from_numpy(np.array(task.tensors[k])) for k in task.tensors if _plain(k)}
        self._qkv, self._out, self._up, self._down = [], [], [], []
        for i in range(task.spec.layers):
            names = [f"layers.{i}.{part}" for part in ("query", "key", "value")]
            self._qkv.append(
                (
                    self._stored(np.concatenate([task.tensors[f"{n}.weight"][:, columns] for n in names], axis=1)),
                    torch.from_numpy(np.concatenate([task.tensors[f"{n}.bias"][columns] for n in names])),
                )
            )
            self._out.append(self._stored(task.tensors[f"layers.{i}.attention_out.weight"][columns]))
            self._up.append(
                (
                    self._stored(task.tensors[f"layers.{i}.mlp_up.weight"][:, self._units]),
                    torch.from_numpy(np.array(task.tensors[f"layers.{i}.mlp_up.bias"][self._units])),
                )
            )
            self._down.append(self._stored(task.tensors[f"layers.{i}.mlp_down.weight"][self._units]))

    @staticmethod
    def _stored(matrix: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(matrix.T))

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

    def query_key_value(self, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, K, V [rows, columns of own heads] of x."""
        q, k, v = F.linear(x, *self._qkv[i]).chunk(3, dim=-1)
        return q, k, v

    def query(self, i: int, x: Tensor) -> Tensor:
        """Return Q alone."""
        weight, bias = self._qkv[i]
        n = len(bias) // 3
        return F.linear(x, weight[:n], bias[:n])

    def key_value(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V alone."""
        weight, bias = self._qkv[i]
        n = len(bias) // 3
        k, v = F.linear(x, weight[n:], bias[n:]).chunk(2, dim=-1)
        return k, v

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output projection of attention, without its bias: a partial sum if there are other heads."""
        parts = [y.reshape(1, len(y), self.heads, -1).transpose(1, 2) for y in (q, k, v)]
        y = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(len(q), -1)
        return F.linear(y, self._out[i])

    def mlp(self, i: int, x: Tensor) -> Tensor:
        """Return the MLP without its last bias: a partial sum if there are other columns."""
        return F.linear(_ACTIVATIONS[self.spec.activation](F.linear(x, *self._up[i])), self._down[i])

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
