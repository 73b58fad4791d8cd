from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import DTYPES, RNG, Case, array, checked, pool

RNG.seed(1)  # for the cases below, which are drawn when this file is imported


def at(value):
    return np.asarray([value], np.int32)


def embed_at(ids, first, word, position):
    return Case("embed_at", [np.asarray(ids, np.int32), at(first)], [(len(ids), word.shape[-1])], [word, position])


def append_rows(state, new, first, **attrs):
    return Case("append_rows", [state, new, at(first)], [state.shape], dtype=DTYPES[state.dtype], **attrs)


def attention_at(q, kv, first, heads, d, **attrs):
    columns = {"q_column": 2, "k_column": kv.shape[1] // 2, "v_column": 1}
    attrs = {**columns, "heads": heads, "head_dim": d, "scale": d**-0.5, **attrs}
    weights = [array(heads)] if attrs.get("sinks") else []
    return Case("attention_at", [q, kv, at(first)], [(len(q), heads * d)], weights, **attrs)


def queries_and_cache(m, capacity, heads, d):
    return array(m, heads * d + 3), array(capacity, 2 * heads * d + 5)


@given(m=st.integers(0, 9), h=st.integers(0, 70), places=st.integers(9, 20), data=st.data())
def test_embed_at(m, h, places, data):
    ids = data.draw(st.lists(st.integers(0, 6), min_size=m, max_size=m))
    first = data.draw(st.integers(0, places - m))
    word, position = array(7, h), array(places, h)
    got = embed_at(ids, first, word, position).check()[0]
    np.testing.assert_array_equal(got, word[ids] + position[first : first + m])


@pytest.mark.parametrize(("ids", "first"), [([3, 7], 0), ([-1], 0), ([1, 2], 8), ([1], -1)])
def test_ids_and_positions_that_the_model_has_not_are_refused(ids, first):
    with pytest.raises(ValueError, match=r"token id|positions of the model"):
        embed_at(ids, first, array(7, 4), array(9, 4)).run()


@given(m=st.integers(0, 9), w=st.integers(0, 20), capacity=st.integers(9, 20), data=st.data())
def test_append_rows(m, w, capacity, data):
    column, behind = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2))
    state, new = array(capacity, w), array(m, column + w + behind)
    first = data.draw(st.integers(0, capacity - m))
    want = np.concatenate([state[:first], new[:, column : column + w], state[first + m :]])
    np.testing.assert_array_equal(append_rows(state, new, first, column=column).check(0, 0)[0], want)


def run_in_place(case, writes):
    with pool(1) as workers:
        checked(case.op, case.slots, case.weights, workers)(case.reads, writes)


@pytest.mark.parametrize("kept", [np.float32, np.float16])
def test_rows_are_appended_in_place_and_others_are_not_touched(kept):
    state, new = np.full((9, 4), np.nan, kept), array(2, 4)
    address = state.ctypes.data
    for writes in ([state], [state[:]]):
        run_in_place(append_rows(state, new, 5), writes)
        np.testing.assert_array_equal(state[5:7], new.astype(kept))
        assert np.isnan(np.delete(state, (5, 6), axis=0)).all()
    assert state.ctypes.data == address


@pytest.mark.parametrize("first", [-1, 8, 9, 1 << 30])
def test_rows_that_do_not_fit_into_the_cache_are_refused(first):
    state = array(9, 4)
    before = state.copy()
    with pytest.raises(ValueError, match="rows of the cache"):
        run_in_place(append_rows(state, array(2, 4), first), [state])
    np.testing.assert_array_equal(state, before)
    q, kv = queries_and_cache(2, 9, 1, 4)
    with pytest.raises(ValueError, match="rows of the cache"):
        attention_at(q, kv, first, 1, 4).run()


@given(
    m=st.integers(0, 40),
    heads=st.integers(0, 3),
    d=st.sampled_from([1, 2, 7, 16, 32, 64]),
    before=st.integers(0, 50),
    after=st.integers(0, 5),
    near=st.sampled_from([{}, {"window": 0}, {"window": 5}, {"window": 60}, {"sinks": True}]),
)
def test_attention_at(m, heads, d, before, after, near):
    q, kv = queries_and_cache(m, before + m + after, heads, d)
    attention_at(q, kv, before, heads, d, **near).check()


@pytest.mark.parametrize(("first", "m"), [(0, 130), (1, 2), (255, 1), (255, 7), (256, 130), (300, 1)])
@pytest.mark.parametrize("kept", [np.float32, np.float16])
def test_many_queries_and_blocks_of_keys(m, first, kept):
    q, kv = queries_and_cache(m, 430, 4, 32)
    kv[first + m :] = np.nan
    for more in ({}, {"window": 100}, {"group": 2}, {"group": 2, "window": 100, "sinks": True}):
        attention_at(q, kv.astype(kept), first, 4, 32, **more).check()


@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("sink", [-np.inf, 40.0])
def test_a_sink_takes_all_weight_or_none(m, sink):
    q, kv = queries_and_cache(m, 50, 2, 32)
    case = attention_at(q, kv, 30, 2, 32, sinks=True)
    case.weights[0][:] = sink
    want = attention_at(q, kv, 30, 2, 32).run()[0] if sink < 0 else np.zeros((m, 64))
    np.testing.assert_allclose(case.run()[0], want, atol=1e-6)


def test_a_prompt_in_parts_is_the_prompt_at_once_and_causal_attention():
    q, kv = queries_and_cache(70, 70, 2, 16)
    whole = attention_at(q, kv, 0, 2, 16).run()[0]
    for first, stop in ((0, 1), (1, 2), (2, 40), (40, 69), (69, 70)):
        part = attention_at(q[first:stop], kv, first, 2, 16).run()[0]
        np.testing.assert_allclose(part, whole[first:stop], rtol=2e-5, atol=2e-5)
    attrs = attention_at(q, kv, 0, 2, 16).op.attrs
    rows = {"q_rows": range(70), "k_rows": ((0, 70),), "lengths": (70,), "causal": True}
    np.testing.assert_array_equal(Case("attention", [q, kv], [(70, 32)], **attrs, **rows).run()[0], whole)


@pytest.mark.parametrize(("threads", "kept"), [(1, np.float32), (3, np.float32), (3, np.float16)])
def test_items_of_few_and_of_many_rows_have_the_bits_of_each_alone(threads, kept):
    lengths, held = (1, 3, 20, 0, 2), [5, 40, 30, 9, 0]
    attrs = attention_at(array(1, 70), array(1, 75), 0, 4, 16, group=2).op.attrs
    q, caches = array(sum(lengths), 70), [array(60, 75).astype(kept) for _ in lengths]
    reads, shapes = [q, *caches, np.asarray(held, np.int32)], [(len(q), 64)]
    together = Case("attention_at", reads, shapes, **attrs, lengths=lengths).run(threads)[0]
    ends = np.cumsum(lengths)
    for m, first, end, cache in zip(lengths, held, ends, caches, strict=True):
        alone = attention_at(q[end - m : end], cache, first, 4, 16, group=2).run()[0]
        np.testing.assert_array_equal(together[end - m : end], alone)


@pytest.mark.parametrize("kept", [np.float32, np.float16])
@pytest.mark.parametrize("near", [{}, {"window": 150}])
def test_some_rows_have_the_bits_of_one_after_the_other(near, kept):
    """So tokens that were guessed are judged as if they came alone."""
    q, kv = queries_and_cache(8, 400, 6, 32)
    kv = kv.astype(kept)
    together = attention_at(q, kv, 250, 6, 32, group=3, **near).check()[0]
    alone = [attention_at(q[i : i + 1], kv, 250 + i, 6, 32, group=3, **near).run()[0] for i in range(8)]
    wide = attention_at(q, kv.astype(np.float32), 250, 6, 32, group=3, **near).run()[0]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    np.testing.assert_array_equal(together, wide)


@pytest.mark.parametrize("m", [1, 200])
def test_any_number_of_threads_gives_the_same_bits(m):
    q, kv = queries_and_cache(m, 1200, 8, 64)
    case = attention_at(q, kv, 1000, 8, 64)
    np.testing.assert_array_equal(case.run(3)[0], case.run(1)[0])


Q, KV = array(2, 7), array(9, 13)


WRONG = {
    "no room for keys": attention_at(Q, KV, 0, 1, 4, k_column=10),
    "a place in f32": Case("append_rows", [KV, KV, array(1)], [KV.shape]),
    "two places": Case("append_rows", [KV, KV, np.zeros(2, np.int32)], [KV.shape]),
    "no new rows": Case("append_rows", [KV, at(0)], [KV.shape]),
    "vectors": Case("append_rows", [array(9), array(2), at(0)], [(9,)]),
    "narrow rows": append_rows(KV, Q, 0, column=0),
    "a negative column": append_rows(KV, KV, 0, column=-1),
    "a column too far": append_rows(KV, KV, 0, column=1),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_ops_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=r"^(append_rows|attention_at): "):
        wrong.run()
