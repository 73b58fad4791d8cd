"""Four agents as processes share two heads of keys and values; one of them is killed in the middle of an answer."""

from __future__ import annotations

import pytest
from site_processes import PATIENCE_S, SITE, running_site, wait_online

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti

AGENTS = ("a", "b", "c", "d")


@pytest.fixture
def site(tmp_path):
    model = make_model("tiny-mistral", tmp_path / "model", seed=3)  # 8 heads of queries
    yield from running_site(tmp_path, {"m": model}, dict.fromkeys(AGENTS, "300MiB"))


@pytest.mark.parametrize("rules", [{}, {"temperature": 1.5, "seed": 7}], ids=["greedy", "seeded"])
def test_a_killed_agent_that_kept_the_same_heads_as_another_changes_and_repeats_no_token(site, rules):
    request = {"ids": [5, 9, 17, 3, 8], "max_new_tokens": 70, "strategy": "decoder", "timeout_s": PATIENCE_S, **rules}
    with Hepti.connect(site.url, site=SITE) as hepti:
        wait_online(hepti, AGENTS)
        whole = hepti.infer("m", **{**request, "strategy": "single"}).result["ids"]
        before = hepti.infer("m", **request, devices=list(AGENTS))
        assert before.result["ids"] == whole
        assert len(before.plan["devices"]) == len(AGENTS)
        parts = hepti.generate("m", **request)
        tokens = [next(parts)["token"]]
        site.kill("c")
        for part in parts:
            assert part["index"] == len(tokens)
            tokens.append(part["token"])
    assert tokens == whole
