"""KV caches over restarts of planner and agents, with real processes: a text that begins alike goes on from them."""

from __future__ import annotations

import shutil
from typing import Final

import pytest
from site_processes import PATIENCE_S, running_site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti

PROMPT: Final = [5 + n % 40 for n in range(40)]
TOKENS: Final = 12
AGENTS: Final = ("a", "b", "c")
MEMORY: Final = "100MiB"


class Restarts:
    """A site of which processes start again, and the tokens of an undisturbed run."""

    def __init__(self, site, pins):
        self.site, self._pins = site, pins
        self.tokens, cached = self.answered()
        assert cached == 0

    def answered(self):
        """Return the tokens that follow a prompt, and how many of the prompt's tokens were cached."""
        with Hepti.connect(self.site.url, self.site.name) as hepti:
            hepti.wait_ready("tiny", PATIENCE_S)
            answer = hepti.infer("tiny", ids=PROMPT, max_new_tokens=TOKENS, temperature=0, timeout_s=PATIENCE_S)
        assert {*answer.plan["devices"]} == {*AGENTS}
        return answer.raw["result"]["ids"], answer.raw["cached_tokens"]

    def start(self, *names):
        for name in names:
            self.site.planner(*self._pins) if name == "planner" else self.site.agent(name, MEMORY)

    def again(self, end, *names):
        for name in names:
            end(name)
        self.start(*names)


@pytest.fixture
def restarts(tmp_path):
    pins = ("--strategy", "decoder", "--devices", ",".join(AGENTS))
    model = make_model("tiny-llama", tmp_path / "model", 3)
    for site in running_site(tmp_path, {"tiny": model}, dict.fromkeys(AGENTS, MEMORY), planner=pins):
        yield Restarts(site, pins)


def test_a_text_goes_on_after_restarts_and_begins_again_after_kills_and_for_another_model(restarts, tmp_path):
    with Hepti.connect(restarts.site.url, restarts.site.name) as hepti:
        shares = hepti.plan("tiny")["active"]["ranges"]
    assert len({stop - start for ranges in shares.values() for start, stop in ranges}) > 1, "uneven shares"
    for names in (("planner",), AGENTS, ("planner", *AGENTS)):
        restarts.again(restarts.site.stop, *names)
        assert restarts.answered() == (restarts.tokens, len(PROMPT) - 1), names
    restarts.again(restarts.site.kill, *AGENTS)
    tokens, cached = restarts.answered()
    assert tokens == restarts.tokens, "a kill costs the cache and nothing else"
    assert cached < len(PROMPT) - 1, "nothing but what this request computed itself, if its plan was replaced"
    for name in ("planner", *AGENTS):
        restarts.site.stop(name)
    shutil.rmtree(tmp_path / "model")
    make_model("tiny-llama", tmp_path / "model", 4)
    restarts.start("planner", *AGENTS)
    tokens, cached = restarts.answered()
    assert cached == 0
    assert tokens != restarts.tokens
