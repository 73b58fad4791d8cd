"""Views of a picture for a decoder: squares of one size, and the tokens that stand for them in a prompt.

A processor of transformers makes one view of a small picture, and several of a large one: parts of it, and all of it.
Of its files every key is read, has no effect, or is refused.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.errors import ModelError, UnsupportedModelError
from hepti_mqtt.models.config import JsonConfig, KeyTable
from hepti_mqtt.models.pictures import PROCESSOR, filter_number, pixel_scale, processor_file

Box = tuple[int, int, int, int]
_LARGEST: Final = 4096  # of a picture's side before it is divided, in transformers
_COMMON: Final = frozenset({
    "do_normalize", "do_rescale", "do_resize", "image_mean", "image_processor_type", "image_std", "resample",
    "rescale_factor", "size",
})  # fmt: skip
_NO_EFFECT: Final = frozenset({
    "_processor_class", "_valid_processor_keys", "data_format", "device", "disable_grouping", "do_convert_rgb",
    "input_data_format", "model_input_names", "processor_class", "return_row_col_info", "return_tensors",
    "video_sampling",
})  # fmt: skip


class Cut(NamedTuple):
    """The division of a picture into views."""

    #: Sizes (width, height) to which the whole picture is resized, one after the other.
    sizes: tuple[tuple[int, int], ...]
    #: Parts of the picture in its last size; each is resized to a view.
    boxes: tuple[Box, ...]
    #: Rows and columns of the parts, 0 without parts.
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Views(ABC):
    """A processor of pictures."""

    side: int  #: pixels of a side of a view
    mean: tuple[float, ...]  #: mean of each channel, of pixels from 0 to 1
    std: tuple[float, ...]  #: standard deviation of each channel
    resample: int  #: number of Pillow's filter
    rows: int  #: rows of a view
    mark: str = "<image>"  #: token of a picture in a prompt
    row: str = "<image>"  #: token of each row of a view in an expanded prompt

    @property
    @abstractmethod
    def marks(self) -> tuple[str, ...]:
        """Return the special tokens that a prompt may have for pictures, `row` first."""

    @abstractmethod
    def cut(self, width: int, height: int, whole: bool = False) -> Cut:
        """Return the views of a picture of some pixels; whole: the picture as one view."""

    @abstractmethod
    def written(self, cut: Cut) -> str:
        """Return the text that replaces a picture's mark in a prompt."""


def read_views(extras: Mapping[str, Any], side: int, rows: int) -> Views:
    """Return the processor of a tower that reads views of `side` x `side` pixels and returns `rows` rows for each.

    Raises ModelError, and UnsupportedModelError for unsupported options.
    """
    file = processor_file(extras)
    kind = str(file.require("image_processor_type"))
    for end in ("Fast", "Pil", "ImageProcessor"):
        kind = kind.removesuffix(end)
    if kind not in _READ:
        names = ", ".join(f"{name}ImageProcessor" for name in _READ)
        raise UnsupportedModelError(f"{file.file}: image_processor_type {kind!r} is not supported; supported: {names}")
    on = {k: v for k, v in file.data.items() if not (k.startswith("do_") and v is False and k not in _READ[kind][1])}
    JsonConfig(file.file, on).check_keys(KeyTable(_COMMON | _READ[kind][1], _NO_EFFECT))
    if not file.flag("do_resize", True):
        raise UnsupportedModelError(f"{file.file}: do_resize false is not supported: pictures come in any size")
    views: Views = _READ[kind][0](file, extras, side, rows)
    return views


def _longest_edge(file: JsonConfig, key: str, usual: int) -> int:
    size = JsonConfig(f"{file.file}: {key}", file.get(key, {"longest_edge": usual}))
    kept = {name: value for name, value in size.data.items() if value is not None}
    if {*kept} != {"longest_edge"}:
        raise UnsupportedModelError(f"{file.file}: {key} {kept} is not supported; supported: longest_edge")
    return size.positive("longest_edge")


def _common(file: JsonConfig, side: int, rows: int, usual_filter: int) -> dict[str, Any]:
    mean, std = pixel_scale(file)
    return {"side": side, "mean": mean, "std": std, "resample": filter_number(file, usual_filter), "rows": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles(Views):
    """Parts in a grid, line by line, and then the whole picture (Idefics 3, SmolVLM)."""

    #: the longer side before it is divided
    longest: int
    is_divided: bool

    @classmethod
    def read(cls, file: JsonConfig, extras: Mapping[str, Any], side: int, rows: int) -> Views:
        """Read the file; raises ModelError, UnsupportedModelError."""
        tile = _longest_edge(file, "max_image_size", 364)
        if tile != side:
            raise UnsupportedModelError(
                f"{file.file}: max_image_size {tile} is not supported: the model reads pictures of {side} pixels"
            )
        processor = JsonConfig(PROCESSOR, extras.get(PROCESSOR, {}))
        if processor.get("image_seq_len", 169) != rows:
            raise ModelError(
                f"{PROCESSOR}: image_seq_len is {processor.get('image_seq_len', 169)!r}, and the model gives {rows} "
                "rows; restore the file"
            )
        longest, divided = _longest_edge(file, "size", 4 * 364), file.flag("do_image_splitting", True)
        return cls(**_common(file, side, rows, 1), longest=longest, is_divided=divided)

    def cut(self, width: int, height: int, whole: bool = False) -> Cut:
        """Return the views of a picture: the grid is of whole tiles, however that changes its shape."""
        first, tile = _fitted(width, height, self.longest), self.side
        if whole or not self.is_divided:
            return Cut((first, (tile, tile)), ((0, 0, tile, tile),))
        w, h = first
        if w >= h:
            columns = math.ceil(w / tile)
            lines = math.ceil(int(columns * tile / (w / h)) / tile)
        else:
            lines = math.ceil(h / tile)
            columns = math.ceil(int(lines * tile * (w / h)) / tile)
        lines, columns = max(lines, 1), max(columns, 1)
        every = (0, 0, columns * tile, lines * tile)
        grid = [(x * tile, y * tile, (x + 1) * tile, (y + 1) * tile) for y in range(lines) for x in range(columns)]
        is_one = len(grid) == 1
        boxes = (every,) if is_one else (*grid, every)
        return Cut((first, every[2:]), boxes, *((0, 0) if is_one else (lines, columns)))

    def written(self, cut: Cut) -> str:
        """Return the tokens of all views, each part with its line and column."""
        around, view = "<fake_token_around_image>", self.row * self.rows
        lines = [
            "".join(f"{around}<row_{y + 1}_col_{x + 1}>{view}" for x in range(cut.columns)) + "\n"
            for y in range(cut.rows)
        ]
        before = "\n" if lines else ""
        return f"{''.join(lines)}{before}{around}<global-img>{view}{around}"

    @property
    def marks(self) -> tuple[str, ...]:
        most = range(1, max(self.longest // self.side, 1) + 1)
        grid = (f"<row_{y}_col_{x}>" for y in most for x in most)
        return (self.row, "<fake_token_around_image>", "<global-img>", *grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole(Views):
    """The whole picture as one view (Gemma 3)."""

    mark: str = "<start_of_image>"
    row: str = "<image_soft_token>"

    @classmethod
    def read(cls, file: JsonConfig, extras: Mapping[str, Any], side: int, rows: int) -> Views:
        """Read the file; raises ModelError, UnsupportedModelError."""
        size = JsonConfig(f"{file.file}: size", file.get("size", {"height": 224, "width": 224}))
        if {size.positive("height"), size.positive("width")} != {side}:
            raise UnsupportedModelError(
                f"{file.file}: size {dict(size.data)} is not supported: the model reads pictures of {side} pixels"
            )
        file.require_one_of("do_pan_and_scan", False, False)
        for said in (file, JsonConfig(PROCESSOR, extras.get(PROCESSOR, {}))):
            if said.get("image_seq_length", rows) != rows:
                raise ModelError(
                    f"{said.file}: image_seq_length is not {rows}, the rows of a picture; restore the file"
                )
        return cls(**_common(file, side, rows, 2))

    def cut(self, width: int, height: int, whole: bool = False) -> Cut:  # noqa: ARG002
        """Return the one view of a picture."""
        return Cut((), ((0, 0, width, height),))

    def written(self, cut: Cut) -> str:  # noqa: ARG002
        """Return the tokens of a picture, with empty lines around it."""
        return f"\n\n{self.mark}{self.row * self.rows}<end_of_image>\n\n"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.row, self.mark, "<end_of_image>")


def _fitted(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return a picture's size after its longer side becomes `longest` pixels; the other side is even."""
    aspect = width / height
    if width >= height:
        w, h = longest, int(longest / aspect)
        h += h % 2
    else:
        w, h = int(longest * aspect), longest
        w += w % 2
    w, h = max(w, 1), max(h, 1)
    aspect = w / h
    if w >= h and w > _LARGEST:
        w, h = _LARGEST, int(_LARGEST / aspect)
    elif h > w and h > _LARGEST:
        w, h = int(_LARGEST * aspect), _LARGEST
    return max(w, 1), max(h, 1)


_TILES: Final = frozenset({"do_image_splitting", "do_pad", "max_image_size"})
_PAN: Final = frozenset({
    "do_pan_and_scan", "image_seq_length", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size",
    "pan_and_scan_min_ratio_to_activate",
})  # fmt: skip
_READ: Final[Mapping[str, tuple[Any, frozenset[str]]]] = {
    "Idefics3": (_Tiles.read, _TILES),
    "Gemma3": (_Whole.read, _PAN),
    "SmolVLM": (_Tiles.read, _TILES),
}


def expanded(text: str, mark: str, written: Sequence[str]) -> str | None:
    """Return a text with each picture's mark replaced; None if the numbers of marks and pictures differ."""
    pieces = text.split(mark)
    if len(pieces) != len(written) + 1:
        return None
    return "".join(piece + one for piece, one in zip(pieces, [*written, ""], strict=True))
