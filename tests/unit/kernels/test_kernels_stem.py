from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import RNG, Case, array

RNG.seed(1)  # for the cases below, which are drawn when this file is imported


def embed(lengths, h=12, vocab=20, positions=16, types=2, offset=0, ids=None, norm=("gamma", "beta"), **attrs):
    m = sum(lengths)
    ids = RNG.randint(0, vocab * max(types, 1), m).astype(np.int32) if ids is None else np.asarray(ids, np.int32)
    tables = {"word": vocab, "position": positions, "type": types}
    weights = {name: array(rows, h) for name, rows in tables.items() if rows} | {name: array(h) for name in norm}
    attrs = {"parts": tuple(weights), "lengths": lengths, "position_offset": offset, "eps": 1e-5, **attrs}
    return Case("embed_tokens", [ids], [(m, h)], [*weights.values()], **attrs)


@given(
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=4).map(tuple),
    types=st.integers(0, 2),
    offset=st.integers(0, 2),
)
def test_embed_tokens(lengths, types, offset):
    embed(lengths, types=types, offset=offset).check(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [(), ("gamma",), ("gamma", "beta")])
@pytest.mark.parametrize("attrs", [{}, {"scale": 5.5}, {"rms": True, "gamma_offset": 1.0}])
def test_embeddings_without_positions_or_norm(norm, attrs):
    embed((3, 40), positions=0, types=0, norm=norm, **attrs).check(rtol=1e-4, atol=1e-4)


@given(
    images=st.integers(0, 2), channels=st.integers(1, 3), side=st.integers(1, 3), patch=st.sampled_from([1, 2, 4, 7])
)
def test_patchify(images, channels, side, patch):
    size = side * patch
    pixels = RNG.randint(0, 256, (images, channels, size, size)).astype(np.uint8)
    case = Case(
        "patchify",
        [pixels],
        [(images * side * side, channels * patch * patch)],
        patch=patch,
        mean=(0.4, 0.5, 0.6)[:channels],
        std=(0.2, 0.3, 0.4)[:channels],
    )
    case.check()


def test_a_patch_flattens_like_the_weights_of_a_convolution():
    pixels = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(1, 2, 4, 4)
    case = Case("patchify", [pixels], [(4, 8)], patch=2, mean=(0.0, 0.0), std=(1 / 255, 1 / 255))
    np.testing.assert_allclose(case.run()[0][1], [2, 3, 6, 7, 18, 19, 22, 23], rtol=1e-6)


@given(
    images=st.integers(1, 3), n=st.integers(1, 5), h=st.integers(1, 9), more=st.integers(1, 3), placed=st.integers(0, 4)
)
def test_prepend_positions(images, n, h, more, placed):
    weights = [array(h), array(more, h), array(min(placed, 1 + more) + n, h)]
    Case("prepend_positions", [array(images * n, h)], [(images * (1 + more + n), h)], weights, images=images).check()


def test_rows_without_a_prefix_and_the_same_row_again():
    Case("prepend_positions", [array(6, 4)], [(6, 4)], [array(3, 4)], images=2).check()
    Case("repeat_row", [array(5, 3)], [(5, 4)], [array(4)]).check()


@pytest.mark.parametrize("shape", [(7,), (3, 1, 5), (0, 4)])
def test_frames_are_numbers_of_fixed_point(shape):
    numbers = RNG.randint(-(2**24), 2**24, int(np.prod(shape))).astype(np.int32)
    Case("frames", [numbers], [shape], [], step=2.0**-20).check(rtol=1e-6, atol=0)


@pytest.mark.parametrize("first", [(0, 0), (4, 2)])
def test_a_part_of_a_table_is_added(first):
    Case("add_table", [array(5, 7)], [(5, 7)], [array(9, 9)], first=first).check(rtol=1e-6, atol=1e-6)


def parts_that_are_not_the_weights():
    case = embed((3,))
    case.op = case.op._replace(attrs={**case.op.attrs, "parts": ("word",)})
    return case


def patches(size, **change):
    attrs = {"patch": 2, "mean": (0.0,), "std": (1.0,), **change}
    return Case("patchify", [np.zeros((1, 1, *size), np.uint8)], [(4, 4)], **attrs)


def positions(count):
    return Case("prepend_positions", [array(4, 3)], [(6, 3)], [array(3), array(count, 3)], images=2)


WRONG = {
    "parts that are not the weights": parts_that_are_not_the_weights(),
    "a negative id": embed((3,), ids=[0, -1, 3]),
    "an id beyond the vocabulary": embed((3,), ids=[0, 40, 3]),
    "the largest id": embed((3,), ids=[0, 2**31 - 1, 3]),
    "too many positions": embed((17,)),
    "too large an offset": embed((15,), offset=2),
    "patches that do not divide the picture": patches((4, 4), patch=3),
    "no square": patches((4, 6)),
    "no deviation": patches((4, 4), std=(0.0,)),
    "two means of one channel": patches((4, 4), mean=(0.0, 0.0)),
    "too few positions": positions(1),
    "more positions than patches": positions(4),
    "a table that ends too early": Case("add_table", [array(5, 7)], [(5, 7)], [array(9, 9)], first=(5, 0)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_ops_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=r"^[a-z_]+: |token id"):
        wrong.run()
