"""Speech over a real broker and processes: the same text by MQTT, HTTP and Wyoming, whole and divided."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import openai
import pytest
from site_load import RATE, RECORDING, SAMPLES
from site_processes import PATIENCE_S, client_of, site_of
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.info import Describe, Info

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.runtime.coordinator.transcriptions import Transcription
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import read_input

site = site_of({"speech": "tiny-whisper-turbo"}, {"a": "100MiB", "b": "100MiB"}, seed=4)
hepti = client_of()


def expected(model, **options):
    """Return the text, its tokens and the encoder's states by whole passes of the reference."""
    with Checkpoint.open(model) as checkpoint:
        spec, tensors = checkpoint.spec, dict(checkpoint.tensors())
        request = {"audio": base64.b64encode(RECORDING).decode(), "language": "en", **options}
        prepared = read_input(checkpoint, request)
        prompt, frames = np.split(prepared.inputs[1:], [prepared.shape.new_rows])
        generation = Transcription(tuple(prompt.tolist()), prepared.new_tokens, prepared.shape, prepared.rules)
        while not generation.done:
            ids = [*generation.prompt, *generation.text.tokens]
            inputs = np.concatenate([[0], ids, frames]).astype(np.int32)
            states, logits = models.reference(spec, tensors, inputs, spec.input_spec.run(len(ids), spec.rows))
            generation.append_tokens(logits)
        return (
            str(decode_output(checkpoint, prepared, logits, None, generation)["text"]),
            list(generation.text.tokens),
            states,
        )


def test_one_text_by_every_way(site, hepti):
    model = site.models["speech"]
    text, ids, states = expected(model, temperature=0)
    ask = {"audio": RECORDING, "language": "en", "temperature": 0, "timeout_s": PATIENCE_S}
    for pins in ({"strategy": "single"}, {"strategy": "row", "options": {"variant": "kv"}, "devices": ["a", "b"]}):
        answer = hepti.infer("speech", **ask, **pins)
        assert (answer.result["ids"], answer.generated) == (ids, text)
        hidden = hepti.infer("speech", **ask, **pins, want="hidden").hidden
        np.testing.assert_allclose(hidden, states, atol=5e-5)
        timed = hepti.infer("speech", **ask, **pins, timestamps="word").result
        words = [word for segment in timed["segments"] for word in segment["words"]]
        assert "".join(word["word"] for word in words) == timed["text"].replace(" ", "") != ""
        moments = [moment for word in words for moment in (word["start"], word["end"])]
        assert moments == sorted(moments)
        assert 0 <= moments[0] < moments[-1] <= timed["seconds"]
    request = {"audio": RECORDING, "language": "en", "temperature": 0, "max_new_tokens": len(ids)}
    tokens = list(hepti.generate("speech", **request))
    assert [token["token"] for token in tokens] == ids
    text = expected(model)[0]  # by chance one of the texts that are drawn, for the model is of random numbers
    with openai.OpenAI(base_url=f"http://127.0.0.1:{site.serve('gateway')}/v1", api_key="none") as client:
        said = client.audio.transcriptions.create(model="speech", file=("a.wav", RECORDING), language="en")
        assert said.text == text
        spoken = client.audio.transcriptions.create(
            model="speech", file=("a.wav", RECORDING), language="en", response_format="verbose_json",
            timestamp_granularities=["word"],
        )  # fmt: skip
        assert "".join(word.word for word in spoken.words) == spoken.text.replace(" ", "")
        assert spoken.segments is None
        with pytest.raises(openai.BadRequestError):
            client.audio.transcriptions.create(model="speech", file=("a.wav", b"no sound"))
    asyncio.run(asyncio.wait_for(_speak(site.serve("wyoming"), text), PATIENCE_S))


async def _speak(port, text):
    async with AsyncTcpClient("127.0.0.1", port) as client:
        await client.write_event(Describe().event())
        (program,) = Info.from_event(await client.read_event()).asr
        assert [(m.name, m.languages) for m in program.models] == [("speech", ["de", "en"])]
        await client.write_event(Transcribe(language="en").event())
        await client.write_event(AudioStart(RATE, 2, 1).event())
        for part in np.array_split(SAMPLES, 5):
            await client.write_event(AudioChunk(RATE, 2, 1, part.tobytes()).event())
        await client.write_event(AudioStop().event())
        assert Transcript.from_event(await client.read_event()).text == text
