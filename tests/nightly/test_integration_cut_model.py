"""A model's file is cut short while it is served, and devices come without tiles of it: every request has an end."""

from __future__ import annotations

import pytest
from site_processes import PATIENCE_S, SITE, User, poll, running_site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti

DEVICES = ("a", "b")
REQUESTS = 16


@pytest.fixture
def site(tmp_path):
    # Of two seeds: models share the tiles that are equal.
    models = {name: make_model("tiny-bert", tmp_path / name, seed=seed) for seed, name in enumerate(("whole", "cut"))}
    yield from running_site(tmp_path, models, dict.fromkeys(DEVICES, "600MiB"))


def test_requests_for_a_model_whose_file_was_cut_short_end_with_an_error(site):
    with Hepti.connect(site.url, site=SITE) as hepti, User(site.url) as user:
        hepti.wait_ready("cut", PATIENCE_S)
        assert hepti.infer("cut", ids=[5, 6], timeout_s=PATIENCE_S).raw["ok"]
        for name in DEVICES:
            site.kill(name)
            for tile in site.tiles(name).values():
                tile.unlink()
        weights = site.models["cut"] / "model.safetensors"
        with weights.open("r+b") as file:
            file.truncate(weights.stat().st_size // 2)
        for n in range(REQUESTS):
            user.send("cut", {"id": f"request-{n}", "ids": [5, 6 + n]})
        for name in DEVICES:
            site.agent(name)
        answers = dict(user.answers.get(timeout=PATIENCE_S) for _ in range(REQUESTS))
        assert len(answers) == REQUESTS
        assert {answer["error"]["code"] for answer in answers.values()} == {"model"}, answers
        poll(lambda: hepti.infer("whole", ids=[5, 6], timeout_s=PATIENCE_S).raw["ok"], "the other model")
