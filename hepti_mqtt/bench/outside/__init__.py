"""Outside baselines: the same weights under PyTorch and ONNX Runtime, started on the hosts of a lab."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from hepti_mqtt.errors import ConfigError, LabError
from hepti_mqtt.lab.hosts import Host, Talking

PATIENCE_S: Final = 300.0
TOLERANCE: Final = 1e-3  # of f32 hidden states after layer norms, summed in other orders


class Baseline(NamedTuple):
    """A module below this package, how many hosts it takes, and its variant."""

    module: str
    least: int
    most: int
    variant: str = ""


BASELINES: Final[Mapping[str, Baseline]] = {
    "torch": Baseline("torch_single", 1, 1),
    "torch-megatron": Baseline("torch_megatron", 2, 16),
    "torch-tokens-x": Baseline("torch_tokens", 2, 16, "x"),
    "torch-tokens-kv": Baseline("torch_tokens", 2, 16, "kv"),
    "onnxruntime": Baseline("onnx_single", 1, 1),
}


class Group:
    """The processes of one baseline, one a host; the first host has the input and the output."""

    def __init__(self, name: str, talks: Sequence[Talking]) -> None:
        self.name, self._talks = name, talks
        self.difference = 0.0
        self.versions: dict[str, str] = {}

    def begin(self) -> None:
        """Wait until every rank is ready; raises LabError if one fails or the hidden states are not the reference's."""
        said = [_answer(talk) for talk in self._talks]
        self.difference, self.versions = said[0]["difference"], said[0]["versions"]
        if not self.difference <= TOLERANCE:  # NaN is wrong too
            raise LabError(
                f"{self.name}: the hidden states differ from the reference by {self.difference:g}; its times would "
                "mean nothing"
            )

    def measure(self) -> float:
        """Return the seconds of one inference, on the first host's clock; raises LabError if a rank fails."""
        for talk in self._talks:
            talk.send("")
        said = [_answer(talk) for talk in self._talks]
        return float(said[0]["latency_s"])

    def close(self) -> None:
        """End every rank."""
        for talk in self._talks:
            talk.signal(9)
        for talk in self._talks:
            talk.wait(PATIENCE_S)


def start(
    name: str,
    hosts: Sequence[Host],
    model: Path,
    tokens: int,
    *,
    seed: int = 0,
    port: int = 29500,
    python: str | None = None,
    interface: str | None = None,
) -> Group:
    """Start a baseline of BASELINES on `hosts` and return it once its output equals the reference's.

    port: a free one of the first host. python: an interpreter with PyTorch and ONNX Runtime, if not the hosts' own.
    interface: the network interface for gloo, where a host has several. Raises ConfigError for an unknown name or a
    number of hosts that it does not take, LabError if a rank fails.
    """
    if name not in BASELINES:
        raise ConfigError(f"there is no baseline {name!r}; known are {', '.join(BASELINES)}")
    baseline = BASELINES[name]
    if not baseline.least <= len(hosts) <= baseline.most:
        raise ConfigError(f"{name} takes {baseline.least} to {baseline.most} hosts, not {len(hosts)}")
    # One thread everywhere: a host of the lab is a share of one core.
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
    talks: list[Talking] = []
    group = Group(name, talks)
    with ExitStack() as failed:
        failed.callback(group.close)
        for rank, host in enumerate(hosts):
            words = {
                "model": host.provide(model), "tokens": tokens, "seed": seed, "rank": rank, "world": len(hosts),
                "master": f"{hosts[0].address}:{port}", "variant": baseline.variant,
            }  # fmt: skip
            options = [text for key, value in words.items() for text in (f"--{key}", str(value))]
            command = [python or host.python, "-m", f"hepti_mqtt.bench.outside.{baseline.module}", *options]
            talks.append(host.talk(f"{name}-{rank}", command, environment))
        group.begin()
        failed.pop_all()
    return group


def _answer(talk: Talking) -> dict[str, Any]:
    words: dict[str, Any] = json.loads(talk.receive(PATIENCE_S))
    return words
