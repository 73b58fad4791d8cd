"""What an agent has in memory at the end of the longest texts is what its account says."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from programs import memory_bytes
from site_processes import PATIENCE_S, SITE, running_site

from device_agent.machine import LOADING_BYTES
from hepti_mqtt.checkpoint import Checkpoint, make, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.memory import session_bytes
from hepti_mqtt.models import largest_shape, with_cache
from hepti_mqtt.planner.price import peak_bytes
from hepti_mqtt.strategies.plan_programs import lower_plan, make_plan

LONGEST = 4096
IN_FLIGHT = 1  # with it two of the longest texts have room
MODEL = {
    "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 4096, "max_position_embeddings": LONGEST, "rope_scaling": None,
}  # fmt: skip
CLOSE = 0.05


@pytest.fixture(params=["f32", "f16"])
def site(request, tmp_path, monkeypatch):
    kind = make.KINDS["tiny-llama"]
    monkeypatch.setitem(make.KINDS, "long", replace(kind, config={**kind.config, **MODEL}))
    model = make_model("long", tmp_path / "model", seed=1)
    options = ("--in-flight", str(IN_FLIGHT), "--kv-cache", request.param)
    yield from running_site(tmp_path, {"m": model}, {"a": "1GiB"}, planner=options)


def account_bytes(path, kept):
    """Return what a device with all of the model needs by its account, and what of it is one text's cache."""
    with Checkpoint.open(path, "m") as checkpoint:
        spec = with_cache(checkpoint.spec, kept)
    plan = make_plan(spec, Plan("m", PlanVersion(1, 1), "single", ("a",), "a"), "single", {}, (1.0,))
    return peak_bytes(spec, plan, "a", IN_FLIGHT), session_bytes(lower_plan(spec, plan, largest_shape(spec)), "a")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_an_agent_takes_what_its_account_says_at_the_context_s_end(site, request):
    rng = np.random.default_rng(1)
    with Hepti.connect(site.url, site=SITE) as hepti:
        hepti.wait_ready("m", PATIENCE_S)
        (caps,) = hepti.devices(wait_s=2.0)
        for _ in range(2):
            prompt = rng.integers(4, 200, LONGEST - 2).tolist()
            hepti.infer("m", ids=prompt, max_new_tokens=2, timeout_s=2 * PATIENCE_S)
        used, peak = (n - caps["rss_idle_bytes"] for n in memory_bytes(site.running["a"].pid))
    account, cache = account_bytes(site.models["m"], request.node.callspec.params["site"])
    assert 2 * cache > 0.8 * account, "or the test shows nothing"
    # Beside its budget an agent sets aside what tiles take while they are loaded.
    least, most = (1 - CLOSE) * account, (1 + CLOSE) * account + LOADING_BYTES
    assert least <= used <= peak <= most, [round(n / 2**20) for n in (least, used, peak, most)]
