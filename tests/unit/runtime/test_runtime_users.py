"""Texts of several users on a virtual clock: fair shares, and no sessions left after a cancel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sites import always, plan, tensors
from swarm import MODEL, Swarm, plan_of

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.protocol import frames
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.kv_caches import reserved_rows
from hepti_mqtt.runtime.coordinator.requests import RequestKey

TINY = spec_of_kind("tiny-llama")
SPEC = replace(TINY, layers=1, max_tokens=4096, text=replace(TINY.text, positions=4096))
TENSORS = tensors(SPEC)
USERS = 8
LONG = 256  # tokens of a long prompt, in runs of at most 128


def rows_of(frame: frames.Frame) -> int:
    return sum(frames.decode_work(frame)[0].sizes)


class Site(Swarm):
    """Devices on which a run takes as long as it has rows, at most; few rows take as long as four."""

    def __init__(self, devices: int = 1, **options) -> None:
        hosts = {f"d{i}": (1e9, 1 << 30) for i in range(devices)}
        chosen = plan(SPEC, ("single", {}) if devices == 1 else ("decoder", {}), (1.0,) * devices)
        super().__init__(SPEC, TENSORS, hosts, decider=always(chosen), batching=Batching(), **options)
        self.run(20, until=lambda: plan_of(self) is not None)

    def op_s(self, host, run_id) -> float:
        rows = next((rows_of(frame) for frame in reversed(self.work) if frame.run_id == run_id), 1)
        return 1e-5 * max(rows, 4)

    def ask(self, client: str, number: int, prompt: int, most: int) -> str:
        """Let a user request a text with a unique prompt."""
        name = f"{client}-{number}"
        ids = np.random.default_rng([*name.encode()]).integers(0, SPEC.text.vocab, prompt)
        self.generate(name, SPEC, ids.astype(np.int32), most, client)
        return name

    def has(self, name: str, tokens: int) -> None:
        """Run until a text has some tokens."""
        self.run(60, until=lambda: len(self.tokens.get(name, ())) >= tokens)
        assert len(self.tokens[name]) >= tokens

    @property
    def sessions_held(self) -> set[tuple[int, int]]:
        """Return the sessions that devices hold, and for how many rows."""
        return {(len(host.session.runs.sessions), host.session.runs.sessions.rows) for host in self.hosts.values()}


def test_no_user_has_less_than_half_of_a_fair_share():
    """Seven write long texts from short prompts; the eighth reads long prompts, one after the other."""
    site = Site()
    for user in range(1, USERS):
        site.ask(f"u{user}", 0, 8, 400)
    site.has("u1-0", 2)
    begun, count = {name: len(tokens) for name, tokens in site.tokens.items()}, 0
    started_s, took_s = site.now, list[float]()
    while len(took_s) < 2:
        name = site.ask("u0", count, LONG, 2)
        site.run(60, until=lambda name=name: name in site.answers)
        count += 1
        took_s.append(site.now - started_s)
    served = {user: len(site.tokens[f"u{user}-0"]) - begun.get(f"u{user}-0", 0) for user in range(1, USERS)}
    served[0] = count * (LONG + 2)
    fair = sum(served.values()) / USERS
    assert min(served.values()) >= fair / 2, (served, took_s)
    assert not site.errors
    assert len(site.answers) == count, "the other texts did not end"


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("prompt", [6, LONG], ids=["in a text", "in a prompt"])
def test_one_who_leaves_frees_what_devices_hold(others, prompt):
    site = Site(2)
    for user in range(1, others + 1):
        site.has(site.ask(f"u{user}", 0, 6, 60), 2)
    name = site.ask("u0", 0, prompt, 90)
    if prompt == 6:
        site.has(name, 3)
    else:
        site.run(60, until=lambda: 128 in map(rows_of, site.work))
    site.tell_planner(interface.RequestCancelled(RequestKey(MODEL, "u0", name)))
    site.run(0.1)
    runs = site.planner.groups.default(MODEL).runs.values()
    assert all(item.request.reply_context != name for run in runs for item in run.items)
    assert {sessions for sessions, _ in site.sessions_held} == {others}
    assert others or site.sessions_held == {(0, 0)}
    version = plan_of(site).version
    site.run(60, until=lambda: len(site.answers) == others)
    assert reserved_rows(site.planner.groups.default(MODEL), version) == 0
    assert set(site.errors) == {name}
