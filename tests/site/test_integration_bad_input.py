"""A model that fits nowhere, and tiles that are damaged on disk: the reason is given, or they are sent again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from site_processes import PATIENCE_S, SITE, Site, poll, running_site, wait_for_plans

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.cli.main import main
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.service.requests import read_input

TOLERANCE = 5e-5
AGENTS = {"a": "30MiB", "b": "30MiB"}  # enough for the tiny models, not for the vocabulary of `huge`


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("bad-input")
    models = {
        "tiny": make_model("tiny-bert", directory / "tiny", seed=3),
        "vit": make_model("tiny-vit-classifier", directory / "vit", seed=4),
        "huge": make_model("minilm", directory / "huge", layers=1),
    }
    try:
        yield from running_site(directory, models, AGENTS)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE) as client:
        wait_for_plans(client, ("tiny", "vit"), AGENTS)
        yield client


@pytest.fixture
def run(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return exit code, stdout and stderr of `hepti ARGUMENTS` at the site."""
    monkeypatch.setenv("HEPTI_BROKER", site.url)
    monkeypatch.setenv("HEPTI_SITE", SITE)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return run


def expected(site: Site, ids: list[int]) -> np.ndarray:
    with Checkpoint.open(site.models["tiny"], "tiny") as checkpoint:
        prepared = read_input(checkpoint, {"ids": ids})
        return models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)[1]


def counters(hepti: Hepti, device: str) -> dict[str, int]:
    heartbeats = {d["device"]: d["heartbeat"] for d in hepti.devices(wait_s=3.0)}
    return heartbeats[device]["counters"] if heartbeats.get(device) else {}


def test_what_fits_nowhere_names_the_devices(run: Any, hepti: Hepti) -> None:
    code, out, err = run("infer", "huge", "--tokens", "8")
    assert (code, out) == (PlanError.exit_code, "")
    assert all(device in err.split() for device in AGENTS)
    assert run("plan", "huge")[0] == PlanError.exit_code
    code, out, _ = run("plan", "huge", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (PlanError.exit_code, "no_plan")


def test_damaged_tiles_are_asked_for_again_and_whole_ones_never(site: Site, hepti: Hepti) -> None:
    ids = [5, 6, 7, 8]
    pins = {"strategy": "single", "devices": ["a"], "timeout_s": PATIENCE_S}
    hepti.infer("tiny", ids=ids, **pins)
    site.stop("a")
    tiles = site.tiles("a")
    damaged = sorted(tiles)[:3]
    for name in damaged:
        data = bytearray(tiles[name].read_bytes())
        data[len(data) // 2] ^= 1
        tiles[name].write_bytes(data)
    site.agent("a", AGENTS["a"])
    poll(lambda: "a" in {d["device"] for d in hepti.devices(wait_s=0.3) if d["status"] == "online"}, "a online")
    every_model_asks = {"strategy": "auto", "devices": ["a"], "timeout_s": PATIENCE_S}
    np.testing.assert_allclose(hepti.infer("tiny", ids=ids, **pins).embedding, expected(site, ids)[0], atol=TOLERANCE)
    hepti.infer("vit", image=Image.new("RGB", (8, 8)), **every_model_asks)
    poll(lambda: set(site.tiles("a")) >= set(damaged), "the damaged tiles have been replaced")
    counts = poll(lambda: (c := counters(hepti, "a")).get("cache_corrupt", 0) == len(damaged) and c, "damage counted")
    new = set(site.tiles("a")) - set(tiles)
    assert counts["tiles_received"] == len(damaged) + len(new)
