"""A decoder at a site of real processes: tokens come one by one, the right ones, whatever is lost meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from site_processes import PATIENCE_S, SITE, Site, User, foretold, running_site

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.cli.main import main
from hepti_mqtt.client import Answer, Hepti
from hepti_mqtt.errors import ConfigError, PlanError, RequestError

pytestmark = [pytest.mark.processes, pytest.mark.broker]

TOLERANCE = 5e-5
PROMPT = np.random.default_rng(3).integers(5, 200, 9).tolist()
DIVIDED = {"strategy": "decoder", "devices": ["a", "b"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("decoder-site")
    model = make_model("tiny-gpt2", directory / "model", seed=3)
    yield from running_site(directory, {"gpt": model}, {"a": "200MiB", "b": "200MiB"})


@pytest.fixture(scope="module")
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE, client_id="tester") as h:

        def knows_both(record: dict) -> bool:
            return {d for c in record["candidates"] for d in c["devices"]} == {"a", "b"}

        h.wait_ready("gpt", PATIENCE_S, knows_both)
        yield h


def expected(site: Site, prompt: list[int], most: int) -> list[int]:
    """Return the tokens that whole passes of the reference choose."""
    ids = list(prompt)
    with Checkpoint.open(site.models["gpt"], "gpt") as checkpoint:
        spec, tensors = checkpoint.spec, checkpoint.tensors()
        end = checkpoint.config["eos_token_id"]
        while len(ids) - len(prompt) < most and (len(ids) == len(prompt) or ids[-1] != end):
            shape, inputs = models.packed(spec, np.array(ids, np.int32))
            ids.append(int(models.reference(spec, tensors, inputs, shape)[1].argmax()))
    return ids[len(prompt) :]


def tokens_of(parts) -> tuple[list[int], str, Answer]:
    """Return the tokens of a generation, their text, and the whole answer."""
    tokens, text = [], ""
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            return tokens, text, end.value
        assert part["index"] == len(tokens)
        tokens.append(part["token"])
        text += part["text"]


def test_ten_tokens_come_one_by_one(site: Site, hepti: Hepti) -> None:
    parts = hepti.generate("gpt", ids=PROMPT, max_new_tokens=10, **DIVIDED, timeout_s=PATIENCE_S)
    tokens, text, answer = tokens_of(parts)
    assert tokens == expected(site, PROMPT, 10)
    assert answer.result == {"ids": tokens, "text": text}
    assert (answer.plan["strategy"], set(answer.plan["devices"])) == ("decoder", {"a", "b"})
    assert answer.raw["final"] is True
    assert answer.raw["runs"] == len(tokens)
    assert (answer.tokens, answer.generated) == (len(PROMPT), text)


def test_the_bytes_are_the_predicted_ones(hepti: Hepti) -> None:
    asked = {"ids": PROMPT, "max_new_tokens": 4, "report": True}
    answer = foretold(lambda: hepti.infer("gpt", **asked, **DIVIDED, timeout_s=PATIENCE_S))
    assert answer.raw["bytes_on_wire"] == answer.raw["predicted_bytes"]
    assert set(answer.raw["compute_ms"]) == {"a", "b"}


def test_plain_mqtt_is_enough(site: Site, hepti: Hepti) -> None:
    user = User(site.url)
    try:
        user.send("gpt", {"text": "the broker of the first room", "max_new_tokens": 5, "id": "mine"})
        told = [user.answers.get(timeout=PATIENCE_S) for _ in range(5)]
        told += [user.answers.get(timeout=PATIENCE_S)] if told[-1][1].get("final") is False else []
    finally:
        user.close()
    *parts, answer = [data for _, data in told]
    assert {topic for topic, _ in told} == {user.topics.response("gpt", user.name, "mine")}
    assert [(p["request"], p["index"], p["final"]) for p in parts] == [("mine", i, False) for i in range(len(parts))]
    assert answer["id"] == "mine"
    assert answer["result"] == {"ids": [p["token"] for p in parts], "text": "".join(p["text"] for p in parts)}


def test_hidden_states_equal_the_reference(site: Site, hepti: Hepti) -> None:
    hidden = hepti.infer("gpt", ids=PROMPT, want="hidden", timeout_s=PATIENCE_S).hidden
    with Checkpoint.open(site.models["gpt"], "gpt") as checkpoint:
        shape, inputs = models.packed(checkpoint.spec, np.array(PROMPT, np.int32), "hidden")
        expected_hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), inputs, shape)
    np.testing.assert_allclose(hidden, expected_hidden, atol=TOLERANCE)


def test_what_a_decoder_cannot_do_is_said(hepti: Hepti) -> None:
    for request, words in (
        ({"texts": ["a", "b"]}, "one text at a time"),
        ({"ids": PROMPT, "max_new_tokens": 1000}, "at most 96"),
        ({"ids": PROMPT, "max_new_tokens": 0}, "max_new_tokens"),
    ):
        with pytest.raises(RequestError, match=words):
            hepti.infer("gpt", **request, timeout_s=PATIENCE_S)
    with pytest.raises((PlanError, ConfigError), match=r"cache.*decoder"):
        hepti.infer("gpt", ids=PROMPT, strategy="row", devices=["a", "b"], timeout_s=PATIENCE_S)


def test_a_prompt_that_is_cut_leaves_room_for_what_is_generated(site: Site, hepti: Hepti) -> None:
    text, ids = "the sensor is warm, " * 100, PROMPT * 20
    for request, kept in (({"max_new_tokens": 4}, 92), ({}, 80), ({"want": "hidden"}, 96)):
        for prompt in ({"text": text}, {"ids": ids}):
            answer = hepti.infer("gpt", **prompt, truncate=True, **request, timeout_s=PATIENCE_S)
            assert answer.tokens == kept
    answer = hepti.infer("gpt", ids=ids, truncate=True, max_new_tokens=4, timeout_s=PATIENCE_S)
    assert answer.result["ids"] == expected(site, ids[:92], 4)
    with pytest.raises(RequestError, match="at most 96"):
        hepti.infer("gpt", text=text, truncate=True, max_new_tokens=96, timeout_s=PATIENCE_S)


def test_the_command_prints_tokens_and_explains_the_plan(
    site: Site, hepti: Hepti, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEPTI_BROKER", site.url)
    monkeypatch.setenv("HEPTI_SITE", SITE)
    ids = ",".join(map(str, PROMPT))
    pins = ("--strategy", "decoder", "--devices", "a,b")
    answer = hepti.infer("gpt", ids=PROMPT, max_new_tokens=6, **DIVIDED, timeout_s=PATIENCE_S)
    assert main(["infer", "gpt", "--ids", ids, "--max-new-tokens", "6", *pins]) == 0
    assert answer.generated in capsys.readouterr().out
    assert main(["infer", "gpt", "--ids", ids, "--max-new-tokens", "6", "--want", "hidden"]) == 0
    assert '"dtype"' in capsys.readouterr().out
    assert main(["plan", "gpt", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "append_rows" in shown
    assert "attention_at" in shown


def test_an_agent_killed_in_between_costs_no_token(site: Site, hepti: Hepti) -> None:
    most = 60
    parts = hepti.generate("gpt", ids=PROMPT, max_new_tokens=most, **{**DIVIDED, "devices": None}, timeout_s=PATIENCE_S)
    first = next(parts)["token"]
    site.kill("b")
    tokens, answer = [first], None
    while answer is None:
        try:
            part = next(parts)
        except StopIteration as end:
            answer = end.value
        else:
            assert part["index"] == len(tokens)
            tokens.append(part["token"])
    # A quick machine may be through before the agent is gone; a loss at a chosen token is tested on a virtual clock.
    assert tokens == answer.result["ids"] == expected(site, PROMPT, most)
