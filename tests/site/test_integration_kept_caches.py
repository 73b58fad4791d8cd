"""KV caches over restarts of planner and agents, with real processes: a text that begins alike goes on from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from site_processes import PATIENCE_S, Site, running_site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti

PROMPT = [5 + n % 40 for n in range(40)]
TOKENS = 12
RESTORED = "continues 1 KV caches"
AGENTS = {"one": {"a": "100MiB"}, "three": {"a": "100MiB", "b": "90MiB", "c": "80MiB"}}


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    agents = AGENTS[request.param]
    pins = ("--strategy", "decoder", "--devices", ",".join(agents)) if len(agents) > 1 else ()
    model = make_model("tiny-llama", tmp_path / "model", 3)
    yield from running_site(tmp_path, {"tiny": model}, agents, planner=pins)


def answered(site: Site) -> tuple[list[int], int]:
    """Return the tokens that follow a prompt, and how many of the prompt's were cached."""
    with Hepti.connect(site.url, site.name) as hepti:
        hepti.wait_ready("tiny", PATIENCE_S)
        raw = hepti.infer("tiny", ids=PROMPT, max_new_tokens=TOKENS, temperature=0, timeout_s=PATIENCE_S).raw
    return raw["result"]["ids"], raw["cached_tokens"]


@pytest.mark.parametrize("site", ["one", "three"], indirect=True)
def test_x(site: Site, request) -> None:
    name = request.node.callspec.params["site"]
    agents = AGENTS[name]
    pins = ("--strategy", "decoder", "--devices", ",".join(agents)) if len(agents) > 1 else ()
    first, cached = answered(site)
    assert cached == 0
    site.stop("planner")
    site.planner(*pins)
    print(answered(site), first)
    print(site.log("planner"))
    for a in agents:
        site.stop(a)
    for a, m in agents.items():
        site.agent(a, m)
    print(answered(site), first)
    print(site.log("planner"), site.log("a"))
