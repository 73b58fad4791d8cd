from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.kernels.attention import log_buckets, relative_buckets
from hepti_mqtt.kernels.tile import NR
from hepti_mqtt.models import plain

LENGTHS = st.lists(st.integers(0, 45), min_size=1, max_size=5).map(tuple)


def attention(lengths, heads, d, *, rows=None, block=None, q=None, kv=None, weights=(), **attrs):
    """All queries (or `rows`) over all keys, or over a block of them: a range, or several; q and kv are whole."""
    m, width = sum(lengths), heads * d
    shared = width // attrs.get("group", 1)
    q = array(m, width + 3) if q is None else q
    kv = array(m, 2 * shared + 5) if kv is None else kv
    rows = range(m) if rows is None else rows
    k_rows = ((0, m),) if block is None else block
    if block and isinstance(block[0], int):
        k_rows = (block,)
    return Case(
        "attention" if block is None else "attention_block",
        [np.ascontiguousarray(q[list(rows)]), np.concatenate([kv[:0], *(kv[slice(*r)] for r in k_rows)])],
        [(len(rows), width) if block is None else (len(rows), heads, d + 2)],
        weights,
        q_column=2,
        k_column=shared + 4,
        v_column=1,
        heads=heads,
        head_dim=d,
        q_rows=rows,
        k_rows=k_rows,
        lengths=lengths,
        scale=d**-0.5,
        **attrs,
    )


@given(lengths=LENGTHS, heads=st.integers(0, 3), d=st.sampled_from([1, 2, 7, 16, 32, 64]))
def test_ragged_sequences_equal_the_reference(lengths, heads, d):
    attention(lengths, heads, d).check()


@pytest.mark.parametrize("bias", ["none", "by distance", "on a grid", "of queries and keys"])
@given(data=st.data(), d=st.sampled_from([7, 8, 16]), causal=st.booleans())
def test_windows_shared_keys_and_biases_equal_plain_attention(bias, data, d, causal):
    side, shares = data.draw(st.integers(1, 6)), bias in ("none", "by distance")
    lengths = (side * side + 1,) * 2 if bias == "on a grid" else data.draw(LENGTHS.filter(min))
    m, groups = sum(lengths), data.draw(st.integers(1, 2))
    group = data.draw(st.integers(1, 3)) if shares else 1
    window = data.draw(st.sampled_from([-1, 0, 1, 5, 20])) if shares else -1
    rows = data.draw(st.lists(st.integers(0, m - 1), max_size=40, unique=True))
    heads, causal = group * groups, causal and shares
    q, kv = array(m, heads * d + 3), array(m, 2 * groups * d + 5)
    attrs = {"causal": causal, "group": group} | ({"window": window} if window >= 0 else {})
    weights, more, longest = [], {}, max(lengths)
    if bias == "of queries and keys":
        weights, attrs["disentangled"], attrs["farthest"] = [array(10, heads * d), array(10, heads * d)], True, 30
        more["positions"] = (*(t.astype("f8") for t in weights), plain.log_buckets(10, 30, longest))
    elif bias != "none":
        table = array(8 if shares else (2 * side - 1) ** 2 + 3, heads + 1)
        weights, attrs["bias_heads"], exact = [table], tuple(range(1, heads + 1)), table.astype("f8")[:, 1:]
        attrs |= {"farthest": 16} if shares else {"bias_side": side}
        more["bias"] = plain.distance_bias(exact, 16, longest) if shares else plain.grid_bias(exact, side)
    got = attention(lengths, heads, d, rows=rows, q=q, kv=kv, weights=weights, **attrs).check(5e-5, 5e-5)[0]
    parts = (x.astype("f8") for x in (q[:, 2:], kv[:, groups * d + 4 :], kv[:, 1:]))
    queries, keys, values = (x[:, : n * d] for x, n in zip(parts, (heads, groups, groups), strict=True))
    want = plain.attention(queries, keys, values, heads, lengths, causal, window, **more)
    np.testing.assert_allclose(got, want[rows], rtol=5e-5, atol=5e-5)
    if bias == "of queries and keys":
        ends = ranges_of(m, data.draw(st.lists(st.integers(0, m), max_size=5)))
        attention(lengths, heads, d, rows=rows, block=ends, q=q, kv=kv, weights=weights, **attrs).check()


@pytest.mark.parametrize("lengths", [(700,), (300, 350)])
def test_the_bits_of_a_windowed_row_do_not_depend_on_which_rows_are_computed_beside_it(lengths):
    m, heads, d = sum(lengths), 2, 16
    q, kv = array(m, heads * d + 3), array(m, 2 * heads * d + 5)
    whole = attention(lengths, heads, d, q=q, kv=kv, window=270).check()[0]
    for rows in (range(100, 640), range(333, 580)):
        part = attention(lengths, heads, d, rows=rows, q=q, kv=kv, window=270).run()[0]
        np.testing.assert_array_equal(part, whole[rows.start : rows.stop])


def test_more_keys_than_one_block_meet_queries_of_distances():
    tables = [array(64, 32), array(64, 32)]
    attention((290, 70), 2, 16, weights=tables, disentangled=True, farthest=300).check()


@pytest.mark.parametrize(("rows", "farthest"), [(8, 40), (14, 40), (512, 600), (64, 33)])
def test_buckets_of_distances_are_those_of_the_oracle(rows, farthest):
    longest = 700
    found = log_buckets(np.arange(1 - longest, longest), rows, farthest)
    t = np.arange(longest)
    np.testing.assert_array_equal(found[t[:, None] - t + longest - 1], plain.log_buckets(rows, farthest, longest))
    assert (np.diff(found) >= 0).all(), "compiled code relies on it"


def test_buckets_of_distances_are_those_of_t5():
    far = np.array([0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 127, 128, 500])
    want = [0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15, 15]
    assert relative_buckets(-far, 32, 128).tolist() == want
    assert relative_buckets(far[1:], 32, 128).tolist() == [bucket + 16 for bucket in want[1:]]


@pytest.mark.parametrize("d", [20, 64])
def test_a_tile_alone_reads_keys_where_they_lie_and_has_the_bits_of_tiles_that_share_copies_of_them(d):
    lengths, heads = (530, 37), 2
    q, kv = array(567, heads * d + 3), array(567, 2 * heads * d + 5)
    whole = attention(lengths, heads, d, q=q, kv=kv).run()[0]
    for first in range(0, 567, NR):
        rows = range(first, min(first + NR, 567))
        alone = attention(lengths, heads, d, rows=rows, q=q, kv=kv).run()[0]
        np.testing.assert_array_equal(alone, whole[rows.start : rows.stop])


def ranges_of(m, edges):
    """Return the ranges between every other pair of edges of 0..m, some of them empty or next to each other."""
    edges = sorted(edges)
    return tuple((min(a, m), min(b, m)) for a, b in zip(edges[::2], edges[1::2], strict=False))


@given(
    lengths=LENGTHS.filter(any),
    cuts=st.lists(st.floats(0, 1), max_size=10),
    devices=st.integers(1, 3),
    causal=st.booleans(),
)
def test_states_of_any_split_combine_to_the_whole(lengths, cuts, devices, causal):
    m, heads, d = sum(lengths), 2, 8
    q, kv = array(m, heads * d + 3, scale=4), array(m, 2 * heads * d + 5, scale=4)
    parts = list(pairwise(sorted([0, m, *(int(c * m) for c in cuts)])))
    states = [
        attention(lengths, heads, d, q=q, kv=kv, block=tuple(parts[n::devices]), causal=causal).check(1e-4, 1e-4)[0]
        for n in range(min(devices, len(parts)))
    ]
    combine = Case("attention_combine", states, [(m, heads * d)], heads=heads, head_dim=d)
    whole = attention(lengths, heads, d, q=q, kv=kv, causal=causal)
    np.testing.assert_allclose(combine.check()[0], whole.reference()[0], rtol=1e-4, atol=1e-4)


def test_rows_without_keys_in_the_block():
    state = attention((4, 6), 2, 8, block=(4, 10)).check()[0]
    assert (state[:4, :, :8] == 0).all()
    assert (state[:4, :, 8] == -np.inf).all()
    assert (state[:4, :, 9] == 0).all()
    nothing = Case("attention_combine", [state[:4], state[:4]], [(4, 16)], heads=2, head_dim=8).check()[0]
    assert (nothing == 0).all()


def test_any_number_of_threads_gives_the_same_bits():
    """Of more keys than a block and more queries than a tile."""
    case = attention((200, 3, 350), 4, 32)
    np.testing.assert_array_equal(case.run(3)[0], case.check()[0])
    states = [attention((200, 3, 350), 4, 32, block=b).run()[0] for b in ((0, 100), (100, 553))]
    combine = Case("attention_combine", states, [(553, 128)], heads=4, head_dim=32)
    np.testing.assert_array_equal(combine.run(3)[0], combine.run(1)[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [12, 3], ids=["key", "value"])
@pytest.mark.parametrize(
    ("lengths", "row", "attrs", "seen"),
    [
        ((8, 32), 3, {}, range(8)),
        ((40,), 30, {"window": 4}, range(26, 35)),
        ((40,), 30, {"causal": True}, range(30, 40)),
    ],
    ids=["its sequence", "its window", "queries after it"],
)
def test_what_is_not_finite_is_seen_where_the_query_looks_and_nowhere_else(lengths, row, attrs, seen, column, value):
    q, kv = array(40, 11), array(40, 21)
    kv[row, column] = value
    case = attention(lengths, 1, 8, q=q, kv=kv, **attrs)
    got, want = case.run()[0], case.reference()[0]
    blind = np.delete(np.arange(40), seen)
    assert np.isfinite(got[blind]).all()
    np.testing.assert_allclose(got[blind], want[blind], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(np.isnan(got[seen]), np.isnan(want[seen]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"q_rows": (4, 0, 1)},
        {"q_rows": (0,)},
        {"k_column": 12},
        {"group": 2},
        {"head_dim": 0},
        *(
            {"k_rows": k_rows}
            for k_rows in (((0, 2), (1, 2)), ((1, 3), (0, 1)), ((0, 2),), ((0, 4),), ((1, 4),), ((2, 1), (1, 3)))
        ),
    ],
    ids=str,
)
def test_ops_that_do_not_fit_are_refused(wrong):
    case = attention((3,), 1, 4)
    bad = Case("attention", case.reads, [(3, 4)], **{**case.op.attrs, **wrong})
    with pytest.raises(ValueError, match=r"^attention: "):
        bad.run()


@pytest.mark.parametrize(
    ("lengths", "attrs", "pairs"),
    [((3, 4), {}, 9 + 16), ((3, 4), {"block": (2, 5)}, 3 * 1 + 4 * 2), ((6,), {"window": 1}, 2 + 4 * 3 + 2)],
    ids=["whole", "a block", "a window"],
)
def test_work_counts_the_pairs_of_a_sequence(lengths, attrs, pairs):
    case = attention(lengths, 2, 8, **attrs)
    assert case.kernel.work(case.op, case.slots).flops == 4 * 8 * 2 * pairs


@pytest.mark.parametrize("queries", range(1, 9))
def test_few_queries_over_many_keys_equal_the_reference(queries):
    attention((300,), 2, 64, rows=range(300 - queries, 300)).check()
    attention((300,), 2, 64, rows=range(300 - queries, 300), causal=True).check()
    attention((300,), 2, 64, rows=range(300 - queries, 300), block=(100, 290), causal=True).check()


@pytest.mark.parametrize("scale", [1e-41, 1e-20, 1.0, 1e4])
@pytest.mark.parametrize("rows", [3, 40])
def test_denormal_and_huge_inputs_are_within_1e_3_of_the_reference(rows, scale):
    # Huge: scores of 1e8 choose one key each; the error is that of f32 scores (1e-7 of them), so values are compared
    # where the choice is clear.
    q, kv = array(40, 19, scale=scale), array(40, 37, scale=scale)
    case = attention((40,), 2, 8, q=q, kv=kv, rows=range(rows))
    got, want = case.run()[0], case.reference()[0]
    bad = ~np.isclose(got, want, rtol=1e-3, atol=max(1e-3 * scale, 1e-44))
    assert bad.mean() <= (0.02 if scale > 1 else 0.0)
