"""Kernels that make rows of pictures.

patchify           pixels u8 [B, C, S, S] -> (pixel / 255 - mean) / std, [B (S/p)^2, C p p], a patch flattened as
                   (channel, y, x) like the weight of a convolution; attributes patch (p), mean, std (per channel).
prepend_positions  patches [B n, h] -> [B (n + 1), h]: cls + position[0], then patch + position; weights cls [h],
                   position [n + 1, h]; attribute images (B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import float32, uint8

from hepti_mqtt.kernels.base import Array, Check, Kernel, Run, rowwise
from hepti_mqtt.kernels.machine.jit import INT, fills, kernel, reads
from hepti_mqtt.kernels.machine.workers import Workers
from hepti_mqtt.kernels.weights import Weight
from hepti_mqtt.program import Compute, SlotSpec


@kernel(reads(uint8, 4), fills(float32, 2), INT, reads(float32, 1), reads(float32, 1))
def _patchify(pixels: Any, out: Any, patch: int, scale: Any, shift: Any) -> None:
    images, channels, size = pixels.shape[0], pixels.shape[1], pixels.shape[2]
    side = size // patch
    for image in range(images):
        for channel in range(channels):
            for y in range(side * patch):
                for across in range(side):
                    row = (image * side + y // patch) * side + across
                    at = (channel * patch + y % patch) * patch
                    for x in range(patch):
                        pixel = np.float32(pixels[image, channel, y, across * patch + x])
                        out[row, at + x] = pixel * scale[channel] + shift[channel]


def _bind_patchify(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.dtypes("u8", "f32")
    check.weights(weights, 0)
    patch = op.attrs["patch"]
    images, channels, size, width = check.reads[0].shape
    check.that(size == width and patch >= 1 and size % patch == 0, f"images must be squares of patches of {patch}")
    check.shape(check.writes[0], (images * (size // patch) ** 2, channels * patch * patch))
    mean, std = (np.asarray(op.attrs[name], np.float64) for name in ("mean", "std"))
    check.that(mean.shape == std.shape == (channels,), f"mean and std need {channels} values, one per channel")
    check.that(bool((std > 0).all()), "std must be > 0")
    scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
    return lambda reads, writes: _patchify(reads[0], writes[0], patch, scale, shift)


def _reference_patchify(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    _weights: Sequence[Array],
) -> list[Array]:
    p = op.attrs["patch"]
    images, channels, size, _ = reads[0].shape
    mean, std = (np.asarray(op.attrs[name], np.float64)[:, None, None] for name in ("mean", "std"))
    values = (reads[0] / 255.0 - mean) / std
    grid = values.reshape(images, channels, size // p, p, size // p, p)
    return [grid.transpose(0, 2, 4, 1, 3, 5).reshape(-1, channels * p * p)]


@kernel(reads(float32, 2), fills(float32, 2), reads(float32, 1), reads(float32, 2), INT)
def _prepend_positions(patches: Any, out: Any, cls: Any, position: Any, images: int) -> None:
    tokens, h = position.shape
    for image in range(images):
        row = image * tokens
        for i in range(h):
            out[row, i] = cls[i] + position[0, i]
        for n in range(1, tokens):
            for i in range(h):
                out[row + n, i] = patches[row - image + n - 1, i] + position[n, i]


def _bind_prepend_positions(op: Compute, slots: Sequence[SlotSpec], weights: Sequence[Weight], _pool: Workers) -> Run:
    check = Check(op, slots)
    check.count(1)
    check.dtypes()
    check.rank(2)
    check.weights(weights, 2)
    images, h = op.attrs["images"], check.writes[0].shape[1]
    cls = check.plain(weights[0], (h,))
    position = check.table(weights[1], h)
    tokens = len(position)
    check.that(tokens >= 1 and images >= 0, f"{images} images of {tokens} positions make no sense")
    check.shape(check.reads[0], (images * (tokens - 1), h))
    check.shape(check.writes[0], (images * tokens, h))
    return lambda reads, writes: _prepend_positions(reads[0], writes[0], cls, position, images)


def _reference_prepend_positions(
    op: Compute,
    _slots: Sequence[SlotSpec],
    reads: Sequence[Array],
    weights: Sequence[Array],
) -> list[Array]:
    cls, position = weights[0].astype(np.float64), np.atleast_2d(weights[1])
    images, h = op.attrs["images"], position.shape[1]
    patches = reads[0].astype(np.float64).reshape(images, len(position) - 1, h)
    first = np.broadcast_to(cls, (images, 1, h))
    return [(np.concatenate([first, patches], axis=1) + position).reshape(-1, h)]


PATCHIFY: Final = Kernel("patchify", _bind_patchify, _reference_patchify, rowwise)
PREPEND_POSITIONS: Final = Kernel("prepend_positions", _bind_prepend_positions, _reference_prepend_positions, rowwise)
