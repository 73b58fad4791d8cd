"""Whether somebody speaks in a recording, and formats that are not WAV."""

from __future__ import annotations

import base64
import io
from fractions import Fraction

import numpy as np
import pytest

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.models.mel import RATE
from hepti_mqtt.runtime.coordinator.texts import TextSoFar
from hepti_mqtt.runtime.coordinator.transcriptions import Transcription
from hepti_mqtt.service import sound
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.languages import NAMES, language_code
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.service.silence import has_pause, is_silent

RNG = np.random.default_rng(5)


def speech(seconds: float, level: float = 0.1) -> np.ndarray:
    """Return syllables: a tone that swells four times a second."""
    time = np.arange(round(seconds * RATE)) / RATE
    return (level * np.sin(2 * np.pi * 180 * time) * np.sin(np.pi * 4 * time) ** 2).astype(np.float32)


def noise(seconds: float, level: float) -> np.ndarray:
    return (level * RNG.standard_normal(round(seconds * RATE))).astype(np.float32)


QUIET = {
    "zeros": np.zeros(RATE, np.float32),
    "nothing": np.zeros(0, np.float32),
    "dither": RNG.integers(-1, 2, 2 * RATE).astype(np.float32) / 32768,
    "an offset": np.full(RATE, 0.3, np.float32),
    "0.05 s": speech(0.05),
    "a quiet room": noise(3, 0.003),
}
LOUD = {
    "speech": speech(1),
    "speech from afar": speech(2, 0.01) + noise(2, 0.0003),
    "a word in a quiet room": np.concatenate([noise(2, 0.001), speech(0.5, 0.02), noise(2, 0.001)]),
    "a loud room": noise(2, 0.05),
}


@pytest.mark.parametrize("name", [*QUIET, *LOUD])
def test_silence(name: str) -> None:
    assert is_silent({**QUIET, **LOUD}[name]) is (name in QUIET)


def test_a_pause_is_one_between_words() -> None:
    still = noise(3, 0.0005)
    assert has_pause(np.concatenate([speech(2), still, speech(2)]))
    assert not has_pause(speech(4))
    assert not has_pause(np.concatenate([still, speech(2), still]))
    assert not has_pause(np.zeros(0, np.float32))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    with Checkpoint.open(make_model("tiny-whisper", tmp_path_factory.mktemp("silence") / "m")) as opened:
        yield opened


def test_the_text_of_silence_is_empty(checkpoint: Checkpoint) -> None:
    for samples, silent in ((np.zeros(RATE // 4, np.float32), True), (speech(0.25), False)):
        audio = base64.b64encode(sound.wav_of(samples)).decode()
        prepared = read_input(checkpoint, {"audio": audio})
        assert prepared.silent is silent
        if silent:
            assert prepared.new_tokens == 1
            generation = Transcription((1,), 1, prepared.shape, prepared.rules, text=TextSoFar([5], [0.0]))
            answer = decode_output(checkpoint, prepared, np.array([5]), generation=generation)
            assert (answer["text"], answer["seconds"]) == ("", 0.25)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("en", "en"), ("nb-NO", "no"), ("iw", "he"), ("jv", "jw"), ("zh-TW", "zh"), ("zh_Hant_TW", "zh"),
        ("EN-us", "en"), ("english", "en"), ("German", "de"), ("xx", None), ("", None), ("auto", None),
    ],
)  # fmt: skip
def test_codes_and_names_of_languages(value: str, code: str | None) -> None:
    assert language_code(value, NAMES) == code


CODECS = {"mp3": ("mp3", "libmp3lame"), "ogg": ("ogg", "libopus"), "m4a": ("mp4", "aac"), "webm": ("webm", "libopus"),
          "flac": ("flac", "flac")}  # fmt: skip


@pytest.mark.parametrize("kind", CODECS)
def test_recordings_of_other_formats(kind: str) -> None:
    av = pytest.importorskip("av")
    samples, rate = speech(2, 0.3), 48_000
    container, codec = CODECS[kind]
    wide = np.repeat(samples, 3)
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.rint(wide * 32767).astype(np.int16)[None], "s16", "mono")
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
        converter = av.AudioResampler(stream.format, "mono", rate, frame_size=stream.frame_size or 1024)
        for part in [*converter.resample(frame), *converter.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    read = sound.read_file("file", file.getvalue(), 30.0)
    assert abs(len(read) / RATE - 2) < 0.2
    assert not is_silent(read)
    with pytest.raises(RequestError):
        sound.read_file("file", file.getvalue()[:40], 30.0)


def test_a_file_that_could_open_others_is_no_recording() -> None:
    for file in (b"#EXTM3U\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"):
        with pytest.raises(RequestError):
            sound.read_file("file", file, 30.0)


def test_a_wav_that_was_cut_says_so() -> None:
    file = sound.wav_of(speech(1))
    with pytest.raises(RequestError, match="cut off"):
        sound.read_file("file", file[:-1000], 30.0)
