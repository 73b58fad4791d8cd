"""A model that fits nowhere, and tiles that are damaged on disk: the reason is given, or they are sent again."""

from __future__ import annotations

import json

import numpy as np
from PIL import Image
from site_processes import PATIENCE_S, client_of, poll, site_of, wait_online

from hepti_mqtt.core.errors import PlanError

AGENTS = {"a": "30MiB", "b": "30MiB"}  # enough for the tiny models, not for the vocabulary of `huge`
site = site_of({"tiny": "tiny-bert", "vit": "tiny-vit-classifier", "huge": ("minilm", 1)}, AGENTS)
hepti = client_of("tiny", "vit")


def counters(hepti, device):
    heartbeats = {d["device"]: d["heartbeat"] for d in hepti.devices(wait_s=3.0)}
    return heartbeats[device]["counters"] if heartbeats.get(device) else {}


def test_what_fits_nowhere_names_the_devices(run_at_site, hepti):
    run = run_at_site
    code, out, err = run("infer", "huge", "--tokens", "8")
    assert (code, out) == (PlanError.exit_code, "")
    assert all(device in err.split() for device in AGENTS)
    assert run("plan", "huge")[0] == PlanError.exit_code
    code, out, _ = run("plan", "huge", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (PlanError.exit_code, "no_plan")


def test_damaged_tiles_are_asked_for_again_and_whole_ones_never(site, hepti):
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
    wait_online(hepti, AGENTS)
    answer = hepti.infer("tiny", ids=ids, **pins)
    np.testing.assert_allclose(answer.embedding, site.reference("tiny", ids=ids)[1][0], atol=5e-5)
    hepti.infer("vit", image=Image.new("RGB", (8, 8)), **(pins | {"strategy": "auto"}))  # every model asks
    poll(lambda: set(site.tiles("a")) >= set(damaged), "the damaged tiles have been replaced")
    counts = poll(lambda: (c := counters(hepti, "a")).get("cache_corrupt", 0) == len(damaged) and c, "damage counted")
    new = set(site.tiles("a")) - set(tiles)
    assert counts["tiles_received"] == len(damaged) + len(new)
