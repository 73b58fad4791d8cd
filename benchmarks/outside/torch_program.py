"""BERT-like models and ViT in PyTorch, one thread: alone, or divided over processes with gloo.

megatron: tensor parallel (Shoeybi et al., 2019): QKV and the first MLP matrix by columns, the output projection and the
second by rows, an all-reduce after each pair. x, kv: own token rows and all weights; the layer's input is gathered and
every rank computes K and V of all rows, or K and V of own rows are gathered.

Weights are stored [out, in] as PyTorch's own modules have them, or packed once into a library's own layout; query, key
and value that are computed from the same rows are one matrix. Eager PyTorch packs a matrix in each call. Packed, it is
what `torch.compile` makes of a frozen model: oneDNN's layout or MKL's, whichever is faster for the shape on this host,
tried at the first call, which is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name

from benchmarks.outside.worker import Array, Made, Options, Task
from hepti_mqtt.core.errors import ConfigError

Tensor = Any
Compute = Callable[[Tensor], Tensor]
Part = Callable[[int, Tensor], Tensor]
QKV: Final = ("query", "key", "value")
_TRIALS: Final = 5
_faster: dict[tuple[int, ...], str] = {}  # by rows and the shape of the matrix
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Linear:
    """x W + b, x always of the same number of rows; weight: [in, out]."""

    def __init__(self, weight: Any, bias: Any | None, *, packed: bool) -> None:
        self._weight = torch.from_numpy(np.ascontiguousarray(weight.T))
        self._bias = None if bias is None else torch.from_numpy(np.array(bias))
        self._compute: Compute | None = None if packed else self._plain

    def __call__(self, x: Tensor) -> Tensor:
        """Return it for x [rows, in]."""
        if self._compute is None:
            self._compute = _packed(self._weight, self._bias, x)
            del self._weight  # held once
        return self._compute(x)

    def _plain(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


def _packed(weight: Tensor, bias: Tensor | None, x: Tensor) -> Compute:
    shape = len(x), *weight.shape
    if shape not in _faster:
        forms = {name: pack(weight, bias, len(x)) for name, pack in _layouts().items()}
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(_TRIALS):
            for name, compute in forms.items():
                begin = time.perf_counter()
                compute(x)
                times[name].append(time.perf_counter() - begin)
        _faster[shape] = min(times, key=lambda name: median(times[name]))
    return _layouts()[_faster[shape]](weight, bias, len(x))


def _layouts() -> Mapping[str, Callable[[Tensor, Tensor | None, int], Compute]]:
    """Return the libraries that this PyTorch has; raises ConfigError if there is none."""
    found = {"oneDNN": (torch.backends.mkldnn, _by_onednn), "MKL": (torch.backends.mkl, _by_mkl)}
    if not (there := {name: pack for name, (library, pack) in found.items() if library.is_available()}):
        raise ConfigError("this PyTorch has neither oneDNN nor MKL: leave the baselines of packed weights out")
    return there


def _by_onednn(weight: Tensor, bias: Tensor | None, rows: int) -> Compute:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _by_mkl(weight: Tensor, bias: Tensor | None, rows: int) -> Compute:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    # Of the plain matrix it reads the shape alone while x has the rows that it was packed for.
    shape = torch.empty(1).expand(weight.shape)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, shape, bias, rows)


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

    def layers(self, x: Tensor, attention: Part, mlp: Part) -> Tensor:
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


def part(count: int, rank: int, world: int) -> tuple[int, int]:
    """Return the half-open range of `rank`: nearly equal ones."""
    return rank * count // world, (rank + 1) * count // world


def make(options: Options, task: Task) -> Made:
    """Return what computes the hidden states; of several ranks the first one has them. Raises ConfigError."""
    torch.set_num_threads(1)
    if not 0 <= options.rank < options.world <= task.spec.heads:
        raise ConfigError(
            f"rank {options.rank} of {options.world} cannot be: at most {task.spec.heads} divide the model"
        )
    many = options.world > 1
    if many:
        place = {"rank": options.rank, "world_size": options.world}
        dist.init_process_group("gloo", init_method=f"tcp://{options.master}", **place)
    given = torch.from_numpy(task.values.astype(np.int64) if task.spec.text else task.values)
    by_rows = options.variant in ("x", "kv")
    run = (_by_rows if by_rows else by_columns)(options, task)

    @torch.inference_mode()  # type: ignore[untyped-decorator,unused-ignore]
    def compute() -> Array | None:
        values = given.clone()
        if many:
            dist.broadcast(values, 0)
        out: Array = run(values).numpy()
        return None if options.rank else out

    versions = {"torch": torch.__version__, "numpy": np.__version__}
    return Made(compute, versions, dist.barrier, dist.destroy_process_group) if many else Made(compute, versions)


def by_columns(options: Options, task: Task, *, stem: bool = True) -> Compute:
    """Return the model alone, or with an all-reduce after each pair of matrices; without `stem` its layers alone."""
    at = options.rank, options.world
    model = Encoder(task, options, part(task.spec.heads, *at), part(task.spec.mlp, *at))

    def summed(x: Tensor) -> Tensor:
        if options.world > 1:
            dist.all_reduce(x)
        return x

    def attention(i: int, x: Tensor) -> Tensor:
        return summed(model.attend(i, *model.project(i, QKV, x))) + model.bias(i, "attention_out")

    def mlp(i: int, x: Tensor) -> Tensor:
        return summed(model.mlp(i, x)) + model.bias(i, "mlp_down")

    return lambda values: model.layers(model.stem(values) if stem else values, attention, mlp)


def _by_rows(options: Options, task: Task) -> Compute:
    """Return the model on own token rows; all ranks have the result."""
    of_x = options.variant == "x"
    model = Encoder(task, options, together=(QKV[:1], QKV[1:]) if of_x else (QKV,))
    counts = [b - a for a, b in (part(task.rows, rank, options.world) for rank in range(options.world))]
    mine = slice(*part(task.rows, options.rank, options.world))

    def gathered(x: Tensor) -> Tensor:
        """Return the rows of all ranks; gloo gathers equal parts only, so shorter ones travel with unused rows."""
        padded = F.pad(x, (0, 0, 0, max(counts) - len(x)))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([rows[:count] for rows, count in zip(parts, counts, strict=True)])

    def attention(i: int, x: Tensor) -> Tensor:
        if of_x:
            q, k, v = *model.project(i, QKV[:1], x), *model.project(i, QKV[1:], gathered(x))
        else:
            q, k, v = model.project(i, QKV, x)
            k, v = gathered(torch.cat([k, v], dim=-1)).chunk(2, dim=-1)
        return model.attend(i, q, k, v) + model.bias(i, "attention_out")

    def mlp(i: int, x: Tensor) -> Tensor:
        return model.mlp(i, x) + model.bias(i, "mlp_down")

    return lambda values: gathered(model.layers(model.stem(values)[mine], attention, mlp))
