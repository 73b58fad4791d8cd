"""A decoder divided over devices generates what the whole model does, with a cache, whatever is lost on the way."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from generated import finish, greedy, site
from sites import TOLERANCE, always, everyone, plan, tensors
from swarm import Swarm, plan_of

from hepti_mqtt import models
from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.cost.memory import max_live_bytes, scratch_bytes, session_rows
from hepti_mqtt.models import with_cache
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_programs, lowered_for_longest

SPEC = spec_of_kind("tiny-gpt2")
MOST = 10
SITES = {
    "single": ("single", (1.0,)),
    "one": ("decoder", (1.0,)),
    "two": ("decoder", (1.0, 1.0)),
    "two uneven": ("decoder", (1.0, 3.0)),
    "three": ("decoder", (1.0, 1.0, 1.0)),
    "three, one nearly nothing": ("decoder", (2.0, 1.0, 0.01)),
    "three, head without a share": ("decoder", (0.0, 1.0, 2.0)),
}


def random_prompt(seed: int, length: int, spec: Any = SPEC) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, spec.text.vocab, length).astype(np.int32)


PROMPT, BEGINNING = random_prompt(3, 8), random_prompt(9, 40)
CASES = [
    *(("tiny-gpt2", name) for name in SITES),
    *(("tiny-llama", name) for name in ("single", "two uneven", "three")),
    ("tiny-qwen3-text", "three"),  # of two heads of keys and values
    ("tiny-qwen3-moe", "three, one nearly nothing"),
    ("tiny-qwen3-moe-mixed", "three"),
    ("tiny-gpt-oss", "three, one nearly nothing"),
    *((f"tiny-{name}", "two uneven") for name in ("mixtral", "olmoe", "granite-moe", "gpt-oss", "smollm3", "granite")),
    *((f"tiny-{name}", "three") for name in ("gemma3-text", "phi3")),  # with windows that texts outgrow
    *((f"tiny-{name}", "two uneven") for name in ("gemma3-text", "mistral", "phi3", "qwen2")),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_ten_tokens_equal_those_of_whole_passes(kind, name):
    spec = spec_of_kind(kind)
    expected, logits = greedy(PROMPT, MOST, spec)
    swarm = site(spec, *SITES[name], duplicates=0.2)
    swarm.generate("r", spec, PROMPT, MOST)
    finish(swarm, "r")
    assert swarm.tokens["r"] == list(enumerate(expected))
    (answer, stats), *more = swarm.answers["r"]
    assert not more
    assert answer.tolist() == expected
    assert [s.shape.tokens for s in stats] == [len(PROMPT)] + [1] * (MOST - 1), "each token is computed once"
    for got, want in zip(swarm.logits.values(), logits, strict=True):
        np.testing.assert_allclose(got, want, atol=TOLERANCE)
    held = {len(host.session.runs.sessions) for host in swarm.hosts.values()}
    assert max(held) == 1, "kept for a text that begins alike"


LLAMA = spec_of_kind("tiny-llama")
SHARED = [
    *((4, heads) for heads in ([4], [2, 2], [1, 2, 1], [1, 1, 1, 1])),
    *((6, heads) for heads in ([6], [5, 1], [2, 3, 1], [2, 1, 0, 3])),
]


@pytest.mark.parametrize(("count", "heads"), SHARED)
def test_heads_that_share_keys_and_values_are_divided_over_devices_that_each_keep_these(count, heads):
    spec = replace(LLAMA, heads=count, block=replace(LLAMA.block, kv_heads=2))
    d, by = spec.head_dim, count // 2
    ranges = tuple(pairwise(accumulate((n * d for n in heads), initial=0)))
    divided = plan(spec, ("decoder", {}), [1.0] * len(heads))
    decider = always(replace(divided, ranges={**divided.ranges, "heads": ranges}))
    swarm = site(spec, "decoder", (1.0,) * len(heads), decider=decider)
    swarm.generate("r", spec, PROMPT, 4)
    finish(swarm, "r")
    assert swarm.answers["r"][0][0].tolist() == greedy(PROMPT, 4, spec)[0]
    programs = device_programs(spec, plan_of(swarm), TokenBatch((1,), cache=64)).values()
    for (first, stop), program in zip(ranges, programs, strict=True):
        kept = len({head // by for head in range(first // d, stop // d)})
        widths = {array.shape[1] for array in program.session_arrays().values()}
        assert widths == ({2 * kept * d} if kept else set()), "each of its heads of keys and values once"


@pytest.mark.parametrize("name", ["single", "three"])
def test_keys_and_values_in_f16_give_nearly_the_same_logits(name):
    expected, logits = greedy(PROMPT, 4, LLAMA)
    swarm = site(with_cache(LLAMA, "f16"), *SITES[name])
    swarm.generate("r", swarm.spec, PROMPT, 4)
    finish(swarm, "r")
    assert [token for _, token in swarm.tokens["r"]] == expected
    wrong = max(np.abs(got - want).max() for got, want in zip(swarm.logits.values(), logits, strict=True))
    assert 0 < wrong < 0.01 * max(np.abs(want).max() for want in logits)


@pytest.mark.parametrize("kind", ["tiny-gpt2", "tiny-llama"])
def test_a_prompt_of_any_length_is_computed_in_runs_of_few_sizes(kind, monkeypatch):
    monkeypatch.setattr("hepti_mqtt.models.shapes.CHUNK_ROWS", 16)
    spec = spec_of_kind(kind)
    swarm = site(spec, "decoder", (1.0, 2.0), duplicates=0.2)
    sizes = set()
    for length in (3, 5, 16, 37):
        prompt = random_prompt(length, length, spec)
        swarm.generate(length, spec, prompt, 2)
        finish(swarm, length)
        (answer, stats), *_ = swarm.answers[length]
        assert answer.tolist() == greedy(prompt, 2, spec)[0]
        sizes |= {s.shape.tokens for s in stats}
    assert sizes <= {1, 2, 4, 8, 16}
    assert swarm.hosts["d0"].session.counters["programs_built_late"] <= 5


def test_the_states_of_a_long_text_are_those_of_one_run(monkeypatch):
    monkeypatch.setattr("hepti_mqtt.models.shapes.CHUNK_ROWS", 16)
    swarm, prompt = site(SPEC, "decoder", (1.0, 1.0)), random_prompt(1, 43)
    shape, inputs = models.single_sequence(SPEC, prompt, "hidden")
    swarm.begin("r", Batch(shape, inputs), Generation(tuple(prompt.tolist()), 0, shape))
    finish(swarm, "r")
    (hidden, stats), *_ = swarm.answers["r"]
    np.testing.assert_allclose(hidden, models.reference(SPEC, tensors(SPEC), inputs, shape)[0], atol=TOLERANCE)
    assert [s.shape.tokens for s in stats] == [16, 16, 16]


def rows_of(swarm: Swarm, name: str) -> int:
    """Return the rows that were computed for a request."""
    (_, stats), *_ = swarm.answers[name]
    return sum(s.shape.tokens for s in stats)


def ask(swarm: Swarm, name: str, *ending: int, most: int = 4) -> list[int]:
    """Submit a text with the common beginning and some ids; return the tokens of whole passes."""
    prompt = np.array([*BEGINNING, *ending], np.int32)
    swarm.generate(name, SPEC, prompt, most)
    return greedy(prompt, most, SPEC)[0]


@pytest.mark.parametrize("lost", ["nothing", "one session", "a device"])
def test_a_text_that_begins_alike_computes_the_rest(lost):
    swarm = site(SPEC, "decoder", (1.0, 2.0), duplicates=0.2)
    texts = {"first": ask(swarm, "first", 1, 2, 3)}
    finish(swarm, "first")
    assert rows_of(swarm, "first") >= 43 + 3
    if lost == "one session":
        swarm.hosts["d1"].session.runs.sessions.keep("m", plan_of(swarm).version, b"", frozenset())
    elif lost == "a device":
        swarm.kill("d1")
        swarm.join("d1", 1e9, 1 << 30)
    texts |= {"again": ask(swarm, "again", 1, 2, 3)}
    finish(swarm, "again")
    texts |= {"other": ask(swarm, "other", 4, 5), "branch": ask(swarm, "branch", 6)}
    finish(swarm, "other", "branch")
    for name, text in texts.items():
        assert swarm.answers[name][0][0].tolist() == text
    again, other, branch = (rows_of(swarm, name) for name in ("again", "other", "branch"))
    assert (again <= 5) == (lost == "nothing"), "else the prompt is computed again"
    assert max(other, branch) <= 8, "one goes on in the session, the other one has a copy"


@pytest.fixture
def little_room(monkeypatch):
    """Leave room for one session and a little."""
    session_rows.cache_clear()
    monkeypatch.setattr("hepti_mqtt.cost.memory.ROWS_IN_FLIGHT", 1)
    yield
    session_rows.cache_clear()


@pytest.mark.usefixtures("little_room")
def test_sessions_wait_for_room_and_those_of_ended_requests_make_it():
    swarm = site(SPEC, "decoder", (1.0, 2.0))
    room_rows = session_rows(SPEC, 2)
    prompts = {f"r{n}": random_prompt(n, 3 + 20 * n) for n in range(4)}
    for name, prompt in prompts.items():
        swarm.generate(name, SPEC, prompt, 20)
    while not prompts.keys() <= swarm.answers.keys():
        before = swarm.now
        swarm.run(1, until=lambda: bool(swarm.errors))
        assert not swarm.errors
        assert swarm.now > before
        for host in swarm.hosts.values():
            assert host.session.runs.sessions.rows <= room_rows
    for name, prompt in prompts.items():
        assert swarm.answers[name][0][0].tolist() == greedy(prompt, 20, SPEC)[0]
    swarm.run(1)
    assert {len(host.session.runs.sessions) for host in swarm.hosts.values()} == {1}


@pytest.mark.usefixtures("little_room")
def test_texts_that_outgrow_the_room_wait_for_those_that_came_before(monkeypatch):
    monkeypatch.setattr("hepti_mqtt.models.shapes.CACHE_ROWS", 8)
    monkeypatch.setattr("hepti_mqtt.runtime.coordinator.kv_caches.ROWS_AHEAD", 4)
    swarm = site(SPEC, "decoder", (1.0, 2.0))
    prompts = {f"r{n}": random_prompt(n, 4) for n in range(4)}
    for name, prompt in prompts.items():
        swarm.generate(name, SPEC, prompt, 50, name)
    swarm.run(60, until=lambda: len(swarm.tokens) == 4)
    assert not swarm.answers, "all of them begin"
    finish(swarm, *prompts)
    for name, prompt in prompts.items():
        assert swarm.tokens[name] == list(enumerate(greedy(prompt, 50, SPEC)[0]))
    runs = {name: len(swarm.answers[name][0][1]) for name in prompts}
    assert runs["r0"] == 50 < max(runs.values()), "the earliest text was never cancelled"


@pytest.mark.parametrize(("length", "runs"), [(8, 0), (8, 4), (61, 3), (61, 12)])
def test_a_lost_device_costs_no_token_and_repeats_none(length, runs, monkeypatch):
    """Within a text, within a long prompt, or behind it."""
    monkeypatch.setattr("hepti_mqtt.models.shapes.CHUNK_ROWS", 8)
    swarm = site(SPEC, "decoder", (1.0, 1.0, 1.0), decider=everyone(("decoder", {})))
    prompt = random_prompt(5, length)
    swarm.generate("r", SPEC, prompt, MOST)
    swarm.run(60, until=lambda: len(swarm.logits) > runs)
    swarm.kill("d1")
    finish(swarm, "r")
    expected, _ = greedy(prompt, MOST, SPEC)
    assert swarm.tokens["r"] == list(enumerate(expected))
    (answer, stats), *more = swarm.answers["r"]
    assert answer.tolist() == expected
    assert not more
    assert sum(s.shape.tokens for s in stats) > length + MOST - 1, "what was cached on it is computed again"
    assert "d1" not in plan_of(swarm).devices


def test_a_lost_exchange_begins_a_new_session():
    swarm = site(SPEC, "decoder", (1.0, 1.0))
    lost = iter([False] * 30 + [True] + [False] * 10_000)
    swarm.lost_filter = lambda topic, target: "/x/" in topic and target == "d1" and next(lost)
    swarm.generate("r", SPEC, PROMPT, MOST)
    finish(swarm, "r")
    assert swarm.tokens["r"] == list(enumerate(greedy(PROMPT, MOST, SPEC)[0]))
    assert any("overdue" in n.text for n in swarm.notes)


GRAPH = models.graph(SPEC, TokenBatch((1,), cache=64))


# Pipeline places every tensor, the cache too, and could keep it layer by layer if it said so.
NO_CACHE = [n for n, s in STRATEGIES.items() if not s.keeps_cache and set(s.needs) <= GRAPH.roles and n != "pipeline"]


@pytest.mark.parametrize("name", NO_CACHE)
def test_methods_that_keep_no_cache_say_so(name):
    assert "cache" in (STRATEGIES[name].why_unsupported(GRAPH) or "")
    with pytest.raises(ValueError, match=r"kv: d1|attention: d0"):
        device_programs(SPEC, plan(SPEC, (name, {}), (1.0, 1.0)), TokenBatch((3,), cache=64))


@pytest.mark.parametrize(("kind", "kept", "nbytes"), [("gpt2", "f32", 4), ("llama", "f32", 4), ("llama", "f16", 2)])
def test_every_position_is_priced_alike_and_sessions_are_in_the_budget(kind, kept, nbytes):
    spec = with_cache(spec_of_kind(f"tiny-{kind}"), kept)
    chosen = plan(spec, ("decoder", {}), (1.0, 1.0))
    one, two = (max_live_bytes(spec, chosen, "d0", n) for n in (1, 2))
    columns = spec.kv_heads * spec.head_dim // 2  # of the own half of the heads
    cache = spec.layers * spec.max_tokens * 2 * columns * nbytes
    scratch = max(scratch_bytes(m.compact_program("d0")) for m in lowered_for_longest(spec, chosen, "d0"))
    assert 2 * one - two == cache + scratch, "of a session besides those of the runs in flight, and of one op"
