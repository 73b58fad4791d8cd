"""Pictures in chats over a real broker and processes: transformers' tokens by MQTT, and one text by every interface."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest
from picture_cases import CASES, TOKENS, encoded
from site_processes import PATIENCE_S, ask_http, client_of, site_of

from hepti_mqtt.core.errors import ConfigError

CASE = CASES[0]
SEERS = {"seer": CASE, "gemma": CASES[2]}
URL = f"data:image/png;base64,{encoded(*CASE.sizes[0])}"
AGENTS = ("a", "b", "c")
QUESTION = "what is in the room"


site = site_of({name: case.kind for name, case in SEERS.items()}, dict.fromkeys(AGENTS, "100MiB"), seed=CASE.seed)
hepti = client_of(online=True)


@pytest.fixture
def raw(hepti):
    """Return the raw answer to a request."""

    def raw(model="seer", **request):
        hepti.wait_ready(model, PATIENCE_S)
        return hepti.infer(model, timeout_s=PATIENCE_S, **request).raw

    return raw


def test_a_prompt_with_a_picture_is_continued_as_by_transformers(raw):
    want = np.load(CASE.file)["tokens"].tolist()
    first, again = (raw(text=CASE.text, image=encoded(*CASE.sizes[0]), max_new_tokens=TOKENS) for _ in range(2))
    ids = first["result"]["ids"]
    assert again["result"]["ids"] == ids == want[: len(ids)]
    assert again["cached_tokens"] > 0
    assert raw(text=CASE.text, image=encoded(21, 20), max_new_tokens=TOKENS)["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("model", "strategy", "count"), [("seer", "megatron", 2), ("gemma", "voltage", 3), ("seer", "decoder", 3)]
)
def test_pictures_and_texts_are_divided_over_pinned_devices(raw, model, strategy, count):
    case, devices = SEERS[model], AGENTS[:count]
    request = {"text": case.text, "images": [encoded(*size) for size in case.sizes], "max_new_tokens": TOKENS}
    answer = raw(model, **request, strategy=strategy, devices=devices)
    divided, other = (model, f"{model}.image") if strategy == "decoder" else (f"{model}.image", model)
    plans = answer["plans"]
    assert (plans[divided]["strategy"], {*plans[divided]["devices"]}) == (strategy, {*devices})
    assert plans[other]["strategy"] != strategy
    assert {*plans[other]["devices"]} <= {*devices}
    assert plans[model] == answer["plan"]
    assert answer["result"]["ids"] == np.load(case.file)["tokens"].tolist()


def test_a_method_that_divides_neither_model_is_refused(raw):
    with pytest.raises(ConfigError):
        raw(text=CASE.text, image=encoded(*CASE.sizes[0]), strategy="map_rows")


def test_one_text_by_every_interface(site, raw):
    port = site.serve("gateway")
    messages = [{"role": "user", "content": QUESTION}]
    text = raw(messages=messages, image=URL, max_new_tokens=8, temperature=0)["result"]["text"]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=PATIENCE_S)
    part = {"type": "image_url", "image_url": {"url": URL}}
    content = [part, {"type": "text", "text": QUESTION}]
    chat = client.chat.completions.create(
        model="seer", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0
    )
    assert chat.choices[0].message.content == text
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": QUESTION}]
    response = client.responses.create(
        model="seer", input=[{"role": "user", "content": parts}], max_output_tokens=8, temperature=0
    )
    assert response.output_text == text
    body = {"model": "seer", "stream": False, "options": {"num_predict": 8, "temperature": 0}}
    body["messages"] = [{"role": "user", "content": QUESTION, "images": [encoded(*CASE.sizes[0])]}]
    assert json.loads(ask_http(port, "/api/chat", body)[1])["message"]["content"] == text
    part["image_url"]["url"] = "https://example.org/a.jpg"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="seer", messages=[{"role": "user", "content": content}])
