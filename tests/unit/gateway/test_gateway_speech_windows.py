"""Long recordings are read window by window, and written in the forms of OpenAI's service."""

import asyncio
import json
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.gateway.bodies import checked
from hepti_mqtt.gateway.routes import RecordingBody, transcriptions
from hepti_mqtt.gateway.site import Site
from hepti_mqtt.service.sound import pcm_of, samples_of, wav_of

RATE = 16_000


class Planner:
    """Hears a word for each second, each half a second long, and never the end of one that a window cuts off."""

    site = "home"

    def __init__(self, temperature=0.0):
        self.asked = []
        self.temperature = temperature

    def submit(self, model, **request):
        self.asked.append(request)
        samples = samples_of("a", pcm_of("a", request["audio"]), 31)
        first, seconds = samples[0], len(samples) / RATE
        words = range(int(np.ceil(seconds - 0.5)))
        segments = [
            {"start": float(i), "end": i + 0.5, "text": f" {round(100 * first) + i}", "ids": [i]} for i in words
        ]
        if request.get("timestamps") == "word":
            for one in segments:
                one["words"] = [{"word": one["text"], "start": one["start"] + 0.1, "end": one["end"]}]
        if seconds == 30.0:  # the last word goes on
            segments.append({"start": 29.5, "end": 30.0, "text": " cut", "ids": [99]})
        result = {
            "text": "".join(one["text"] for one in segments).strip(), "language": "en", "seconds": seconds,
            "temperature": self.temperature, "score": -0.1, "compression": 1.0, "no_speech": 0.0, "ids": [],
        }  # fmt: skip
        if request.get("timestamps"):
            result |= {"segments": segments, "seek": 29.0 if seconds == 30.0 else seconds}
        answer = Future()
        answer.set_result(SimpleNamespace(result=result))
        return answer

    def models(self, timeout=0.0):
        return ["whisper"]


def site(planner):
    return Site(planner, 60.0)


def recording(seconds):
    """Return a recording whose samples say how late it is, with sounds between that are no even noise."""
    late = np.repeat(np.arange(seconds, dtype=np.float32) / 100, RATE)
    sounds = np.where(np.arange(len(late)) // 2000 % 2, 0.004, 0) * np.where(np.arange(len(late)) % 2, 1, -1)
    return wav_of((late + sounds * (np.arange(len(late)) % RATE > 100)).astype(np.float32))


def test_each_window_begins_where_the_last_segment_ended():
    planner = Planner()
    found = asyncio.run(site(planner).transcribe("whisper", recording(70), prompt="Names"))
    assert found.text == " ".join(map(str, range(70)))
    assert [one["start"] for one in found.segments] == list(range(70))
    assert (found.language, found.seconds) == ("en", 70.0)
    assert [asked["language"] for asked in planner.asked] == [None, "en", "en"]
    assert planner.asked[1]["prompt"] == ["Names", *range(29)]
    assert planner.asked[2]["prompt"] == ["Names", *range(29), *range(29)]


def test_what_was_drawn_at_random_is_not_gone_on_with():
    planner = Planner(temperature=0.8)
    asyncio.run(site(planner).transcribe("whisper", recording(40), prompt="Names"))
    assert [asked["prompt"] for asked in planner.asked] == [["Names"], None]


def test_a_short_recording_is_one_request_without_times():
    planner = Planner()
    assert asyncio.run(site(planner).transcribe("whisper", recording(3))).segments == ()
    assert not planner.asked[0]["timestamps"]


def ask(**fields):
    return asyncio.run(transcriptions(site(Planner()), checked(RecordingBody, {"file": recording(2), **fields})))


def test_every_form_of_an_answer():
    assert ask() == {"text": "0 1"}
    assert ask(response_format="text") == "0 1\n"
    assert ask(response_format="srt") == (
        "1\n00:00:00,000 --> 00:00:00,500\n0\n\n2\n00:00:01,000 --> 00:00:01,500\n1\n"
    )
    assert ask(response_format="vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:00.500\n0\n\n00:00:01.000 --> 00:00:01.500\n1\n"
    )
    verbose = ask(response_format="verbose_json", **{"timestamp_granularities[]": ["segment"]})
    assert [(one["id"], one["start"], one["tokens"]) for one in verbose["segments"]] == [(0, 0.0, [0]), (1, 1.0, [1])]
    assert json.dumps(verbose)
    assert verbose["language"] == "english"
    words = ask(response_format="verbose_json", **{"timestamp_granularities[]": ["word"]})
    assert words["words"] == [{"word": "0", "start": 0.1, "end": 0.5}, {"word": "1", "start": 1.1, "end": 1.5}]
    assert "segments" not in words
    both = ask(response_format="verbose_json", **{"timestamp_granularities[]": ["segment", "word"]})
    assert (both["words"], both["segments"]) == (words["words"], verbose["segments"])


def test_words_of_later_windows_have_times_of_the_recording():
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word"], "file": recording(40)}
    found = [(one["word"], one["start"]) for one in ask(**fields)["words"]]
    assert found == [(str(i), pytest.approx(i + 0.1)) for i in range(40)]


@pytest.mark.parametrize(
    "fields",
    [
        {"timestamp_granularities[]": ["word"]},
        {"timestamp_granularities[]": ["word"], "response_format": "srt"},
        {"timestamp_granularities[]": ["letter"], "response_format": "verbose_json"},
        {"response_format": "docx"},
        {"temperature": "hot"},
        {"stream": "true"},
        {"file": None},
        {"file": b"RIFF\0\0\0\0WAVE"},
        {"include[]": ["logprobs"]},
    ],
    ids=str,
)
def test_what_is_not_done_is_refused(fields):
    with pytest.raises(RequestError):
        ask(**fields)
