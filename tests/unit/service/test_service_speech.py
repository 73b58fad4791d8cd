"""Recordings become the frames that the reference's preprocessor makes; what is no sound is refused."""

from __future__ import annotations

import base64
import io
import json
import struct
import wave
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import HeptiError, ModelError, RequestError
from hepti_mqtt.models.generation import Moments, TokenRules
from hepti_mqtt.models.mel import log_mel
from hepti_mqtt.models.shapes import STEP
from hepti_mqtt.models.speech import SpeechInput
from hepti_mqtt.runtime.coordinator.texts import TextSoFar
from hepti_mqtt.runtime.coordinator.transcriptions import Attempt, Transcription
from hepti_mqtt.service import sound
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import ModelInput, read_input
from hepti_mqtt.service.speech import judge, segments_of, window_rows


def tone(hz: float, seconds: float, rate: int = 16_000) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        scaled = np.rint(np.repeat(samples, channels) * (2 ** (8 * width - 1) - 1)).astype("<i4")
        raw = scaled.view(np.uint8).reshape(-1, 4)[:, :width]
        file.writeframes((raw + np.uint8(128) if width == 1 else raw).tobytes())
    return buffer.getvalue()


def riff(form: bytes, data: bytes) -> bytes:
    return b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data


def form(tag: int, bits: int, rate: int = 16_000, channels: int = 1) -> bytes:
    frame = channels * bits // 8
    return struct.pack("<HHIIHH", tag, channels, rate, rate * frame, frame, bits)


def heard(file: bytes) -> np.ndarray:
    return sound.read("audio", base64.b64encode(file).decode(), 30.0)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_every_width(width: int, channels: int) -> None:
    samples = heard(wav(tone(440, 0.3), width=width, channels=channels))
    np.testing.assert_allclose(samples, tone(440, 0.3), atol=2.0 ** (2 - 8 * width) + 1e-6)


def test_floats_and_a_length_that_a_stream_could_not_know() -> None:
    data = tone(440, 0.2).tobytes()
    np.testing.assert_array_equal(heard(riff(form(3, 32), data)), tone(440, 0.2))
    endless = riff(form(3, 32), data).replace(struct.pack("<I", len(data)), struct.pack("<I", 0xFFFFFFFF))
    np.testing.assert_array_equal(heard(endless), tone(440, 0.2))


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 44_101, 48_000])
def test_other_rates_keep_what_16_khz_can_hold(rate: int) -> None:
    samples = heard(wav(tone(1000, 1.0, rate), rate=rate))
    assert len(samples) == 16_000
    np.testing.assert_allclose(samples[200:-200], tone(1000, 1.0)[200:-200], atol=1e-3)
    if rate > 20_000:
        above = heard(wav(tone(9000, 1.0, rate), rate=rate))
        assert np.abs(above[200:-200]).max() < 1e-3, "what is higher is left out, not folded down"


@pytest.mark.parametrize(
    ("file", "word"),
    [
        (b"", "empty"),
        (b"not sound at all", "WAV"),
        (wav(tone(440, 0.0)), "no samples"),
        (riff(form(7, 8, 8000), b"\x55" * 800), "mu-law"),
        (wav(tone(440, 31.0)), "31.0 s"),
        (riff(form(1, 8, 4000), bytes(3600 * 4000)), "3600.0 s"),
        (riff(form(3, 32), np.full(160, np.nan, "<f4").tobytes()), "NaN"),
        (riff(form(1, 16, rate=1), b"\0" * 320), "1 samples per second"),
        (riff(form(1, 16, channels=40), b"\0" * 320), "40 channels"),
        (riff(form(1, 16), b"")[:36], "without samples"),
        (b"RIFF\0\0\0\0WAVE" + b"\xff" * 64, "without samples"),
    ],
)
def test_what_is_no_sound_is_refused(file: bytes, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        heard(file)


def test_frames_are_those_of_the_reference() -> None:
    """Golden numbers of transformers' WhisperFeatureExtractor (5.24.0) for this signal and the silence after it."""
    time = np.arange(16_000) / 16_000
    signal = (0.5 * np.sin(2 * np.pi * (300 + 2000 * time) * time)).astype(np.float32)
    frames = log_mel(np.pad(signal, (0, 16_000)), 80)
    assert frames.shape == (200, 80)
    values = frames[[0, 0, 50, 50, 99, 99, 100, 150], [0, 12, 40, 79, 60, 5, 30, 10]]
    np.testing.assert_allclose(values, GOLDEN, atol=1e-4)


GOLDEN = (1.06782, 0.98929, -0.51637, -0.58907, 0.1164, -0.23715, 0.29337, -0.58907)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    with Checkpoint.open(make_model("tiny-whisper", tmp_path_factory.mktemp("speech") / "m")) as opened:
        yield opened


AUDIO = {"audio": base64.b64encode(wav(tone(440, 0.3))).decode()}


def test_a_request_is_the_prompt_and_the_frames_of_its_window(checkpoint: Checkpoint) -> None:
    reads, tokens = checkpoint.spec.input_spec, checkpoint.speech
    prepared = read_input(checkpoint, {**AUDIO, "language": "de"})
    assert prepared.shape == reads.run(4, reads.longest)
    assert prepared.inputs.shape == reads.input_layout(prepared.shape)[0]
    steering = [tokens.start, tokens.languages["de"], tokens.tasks["transcribe"], tokens.plain]
    assert prepared.inputs[:5].tolist() == [0, *steering]
    whole = np.zeros(2 * reads.longest * 160, np.float32)
    whole[:4800] = tone(440, 0.3)
    frames = log_mel(whole, reads.bands)
    np.testing.assert_allclose(prepared.inputs[5:] * STEP, frames.reshape(-1), atol=1e-3)  # 16 bits a sample
    prepared_input = read_input(checkpoint, AUDIO)
    assert prepared_input.inputs[:2].tolist() == [0, tokens.start], "the language ends the prompt"
    assert prepared_input.rules.choices == tuple(tokens.languages.values())
    assert prepared_input.rules.temperatures == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert prepared_input.rules.forced == (tokens.tasks["transcribe"], tokens.plain)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """A model with the tokens of times."""
    with Checkpoint.open(make_model("tiny-whisper-turbo", tmp_path_factory.mktemp("speech") / "m")) as opened:
        yield opened


def test_what_was_said_before_comes_before_the_prompt(timed: Checkpoint) -> None:
    reads, tokens = timed.spec.input_spec, timed.speech
    light = timed.tokenizer.token_to_id("light")
    request = {**AUDIO, "language": "en", "timestamps": True, "prompt": ["light", tokens.plain + 3, "light"]}
    prepared_input = read_input(timed, request)
    said = [tokens.before, light, tokens.plain + 3, light]
    steering = [tokens.start, tokens.languages["en"], tokens.tasks["transcribe"]]
    assert prepared_input.inputs[: 1 + prepared_input.shape.new_rows].tolist() == [0, *said, *steering]
    assert prepared_input.shape == reads.run(7, reads.longest, start=4)
    assert prepared_input.rules.moments == Moments(tokens.plain + 1, tokens.end, tokens.plain, 50)
    longer = read_input(timed, {**request, "prompt": [light] * 99})
    assert longer.shape.start == 1 + reads.positions // 2 - 1, "as many as the reference takes"
    unknown = read_input(timed, {**AUDIO, "prompt": "light"})
    assert (unknown.rules.opening, unknown.inputs[1]) == ((tokens.before, light), tokens.start)


def test_a_text_with_times_has_segments(timed: Checkpoint) -> None:
    tokens, light = timed.speech, timed.tokenizer.token_to_id("light")
    first, rows = tokens.plain + 1, timed.spec.input_spec.longest
    prompt, rules = tokens.begin("en", "transcribe", timed=True)
    shape = timed.spec.input_spec.run(len(prompt), rows)
    ids = [first, light, first + 4, first + 5, light, first + 9, tokens.end]
    generation = Transcription(prompt, 8, shape, rules, text=TextSoFar(ids, [-0.1] * 7))
    prepared = ModelInput(shape, np.empty(0), False, 5, new_tokens=8, rules=rules, seconds=0.4)
    result = decode_output(timed, prepared, np.array(ids), None, generation)
    assert [(one["start"], one["end"], one["text"]) for one in result["segments"]] == [
        (0.0, 0.08, "light"),
        (0.1, 0.18, "light"),
    ]
    assert (result["text"], result["seek"]) == ("light light", 0.4)
    generation.beginnings = np.array([0, 2, 6, 6, 8, 9], np.float32)
    timed_words = decode_output(timed, replace(prepared, sound_rows=20), np.array(ids), None, generation)
    assert [one.pop("words") for one in timed_words["segments"]] == [
        [{"word": "light", "start": 0.0, "end": 0.04}],
        [{"word": "light", "start": 0.12, "end": 0.16}],
    ]
    assert timed_words == result


def test_times_of_words_are_asked_of_the_rows_with_sound(timed: Checkpoint) -> None:
    request = {**AUDIO, "language": "en", "timestamps": "word"}
    prepared_input = read_input(timed, request)
    assert prepared_input.sound_rows == 15, "0.3 s"
    assert prepared_input.rules.moments is not None
    assert read_input(timed, {**request, "timestamps": True}).sound_rows == 0


def test_a_model_with_the_alignment_heads_of_its_teacher_has_no_times_of_words(tmp_path) -> None:
    path = make_model("tiny-whisper-turbo", tmp_path / "m")
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alignment_heads": [[25, 3]]}))
    with Checkpoint.open(path) as checkpoint:
        read_input(checkpoint, {**AUDIO, "language": "en", "timestamps": True})
        with pytest.raises(RequestError):
            read_input(checkpoint, {**AUDIO, "language": "en", "timestamps": "word"})


GENERATION, PREPROCESSOR = "generation_config.json", "preprocessor_config.json"
#: A file of the model's directory and its changed values.
OTHER_MODELS = [
    *(
        ("config.json", values)
        for values in (
            {"scale_embedding": True},
            {"is_encoder_decoder": False},
            {"decoder_attention_heads": 2},
            {"decoder_ffn_dim": 64},
            {"max_target_positions": 48},
            {"num_mel_bins": 7, "encoder_layers": 0},
            {"activation_function": "swoosh"},
            {"vocab_size": "many"},
            {"num_beams": 5},  # read where the directory has no generation_config.json
        )
    ),
    *((GENERATION, {key: value}) for key, value in (("num_beams", 5), ("suppress_tokens", [99]))),
    *(
        (PREPROCESSOR, {key: value})
        for key, value in (("feature_size", 80), ("hop_length", 320), ("do_normalize", True))
    ),
    ("processor_config.json", {"feature_extractor": {"sampling_rate": 8000}}),
]


@pytest.mark.parametrize(("name", "values"), OTHER_MODELS, ids=str)
def test_a_model_that_hears_or_writes_otherwise_is_refused(tmp_path, name: str, values: dict) -> None:
    path = make_model("tiny-whisper", tmp_path / "m")
    if "num_beams" in values:
        (path / GENERATION).unlink()
    before = json.loads((path / name).read_text()) if name == "config.json" else {}
    (path / name).write_text(json.dumps(before | values))
    with pytest.raises(ModelError), Checkpoint.open(path) as opened:
        _ = opened.speech


@pytest.mark.parametrize("prompt", [[3.5], [True], [[1]], {"a": 1}, 7, [96 + 1], ["light", -1]], ids=str)
def test_a_prompt_that_is_no_text_is_refused(timed: Checkpoint, prompt) -> None:
    with pytest.raises(RequestError):
        read_input(timed, {**AUDIO, "prompt": prompt})


WRONG: dict[str, tuple] = {
    "language": ("xx", 3),
    "task": ("sing",),
    "window": (3600, 0.01, True),
    "timestamps": (True, 1, "word", "letter"),
    "prompt": ("words",),
    "temperature": (1.5, [0] * 9, "hot"),
    "truncate": (True,),
    "top_k": (3,),
    "text": ("words",),
    "audio": (7, "%%%"),
}


@pytest.mark.parametrize(("key", "value"), [(key, one) for key, values in WRONG.items() for one in values])
def test_what_speech_does_not_know_is_refused(checkpoint: Checkpoint, key: str, value) -> None:
    with pytest.raises(RequestError):
        read_input(checkpoint, {**AUDIO, key: value})


def test_other_models_hear_nothing(tmp_path) -> None:
    with Checkpoint.open(make_model("tiny-bert", tmp_path / "b")) as words:
        for request in (AUDIO, {"text": "a", "language": "en"}):
            with pytest.raises(HeptiError):
                read_input(words, request)


def test_windows_come_in_steps() -> None:
    reads = SpeechInput(100, 80, 1500, 448)
    assert [window_rows(reads, s) for s in (0.1, 9.4, 9.6, 12.0, 29.9, 30.0)] == [500, 500, 600, 700, 1500, 1500]
    assert window_rows(reads, 3.0, 30) == 1500
    assert window_rows(reads, 3.0, 10.5) == 525


def answered(checkpoint: Checkpoint, tokens: list[int], scores: list[float], silence: float) -> dict:
    steering, rules = checkpoint.speech.begin("en", "transcribe")
    shape = checkpoint.spec.input_spec.run(len(steering), 24)
    verdict = judge(checkpoint, tokens, scores, silence)
    text = TextSoFar(tokens, scores)
    tried = [Attempt(text, verdict)]
    generation = Transcription(steering, 8, shape, rules, text=text, silence=silence, tried=tried)
    prepared = ModelInput(shape, np.empty(0), False, 5, new_tokens=8, rules=rules, seconds=0.3)
    return decode_output(checkpoint, prepared, np.array(tokens), None, generation)


def test_an_answer_says_how_sure_it_is(checkpoint: Checkpoint) -> None:
    end, word = checkpoint.speech.end, checkpoint.tokenizer.token_to_id("light")
    sure = answered(checkpoint, [word, end], [-0.1, -0.3], 0.1)
    assert (sure["text"], sure["language"], sure["doubtful"]) == ("light", "en", False)
    assert sure["score"] == pytest.approx(-0.2)
    assert answered(checkpoint, [word, end], [-2.0, -2.0], 0.1)["doubtful"]
    assert answered(checkpoint, [word] * 60, [-0.1] * 60, 0.1)["doubtful"], "it repeats itself"
    silent = answered(checkpoint, [word, end], [-2.0, -2.0], 0.9)
    assert (silent["text"], silent["doubtful"]) == ("", False)


def test_tokens_are_chosen_by_the_rules() -> None:
    logits = np.array([[0.0, 9.0, 8.0, 7.0, 6.0]], np.float32)
    rules = TokenRules(never=(1,), first_never=(2,), choices=(3, 4), scored=True, silent=1)
    assert rules.choose_prompt(logits) == 3
    assert [rules.choose(logits, before)[0] for before in ((), (3,))] == [3, 2]
    assert rules.choose(logits, (3,))[1] == pytest.approx(-np.log1p(np.exp(-1) + np.exp(-2) + np.exp(-8)), rel=1e-5)
    assert rules.silence(logits) == pytest.approx(1 / (1 + np.exp(-1) + np.exp(-2) + np.exp(-3) + np.exp(-9)), rel=1e-5)
    assert TokenRules().choose(logits, ()) == (1, 0.0)


END, PLAIN, ZERO = 10, 11, 12  # then moments up to 0.16 s


@pytest.mark.parametrize(
    ("before", "allowed"),
    [
        ([], range(ZERO, ZERO + 3)),  # a text begins with a moment, and soon
        ([ZERO], range(END + 1)),  # then come words
        ([ZERO, 1], [*range(END + 1), *range(ZERO + 1, ZERO + 9)]),  # or a later moment
        ([ZERO, 1, ZERO + 4], [END, *range(ZERO + 4, ZERO + 9)]),  # which is one of a pair, or the last
        ([ZERO, 1, ZERO + 4, ZERO + 4], range(END + 1)),
    ],
)
def test_moments_come_in_pairs_and_in_order(before: list[int], allowed) -> None:
    rules = TokenRules(moments=Moments(ZERO, END, PLAIN, 2))
    for token in range(ZERO + 9):
        logits = np.zeros((1, ZERO + 9), np.float32)
        logits[0, token] = 50.0
        assert (rules.choose(logits, before)[0] == token) == (token in allowed), token
    logits = np.full((1, ZERO + 9), -9.0, np.float32)
    logits[0, 3], logits[0, ZERO + 1 :] = 1.0, 0.5
    assert rules.choose(logits, [ZERO, 1])[0] >= ZERO, "all moments together outweigh a word"


@pytest.mark.parametrize(
    ("ids", "parts", "seek"),
    [
        ([ZERO, 1, 2, ZERO + 4, END], [(0.0, 0.08)], 0.16),
        ([ZERO, 1, ZERO + 2, ZERO + 3, 2, ZERO + 5, END], [(0.0, 0.04), (0.06, 0.1)], 0.16),
        ([ZERO, 1, ZERO + 2, ZERO + 3, 2, END], [(0.0, 0.04), (0.06, 0.16)], 0.04),
        ([ZERO, 1, ZERO + 2, ZERO + 2, END], [(0.0, 0.04)], 0.04),
        ([ZERO, 1, 2], [(0.0, 0.16)], 0.16),
        ([ZERO, END], [], 0.16),
        ([END], [], 0.16),
    ],
)
def test_segments_lie_between_moments(ids: list[int], parts: list, seek: float) -> None:
    segments, ends = segments_of(ids, Moments(ZERO, END, PLAIN, 2), 0.16)
    assert [(round(part.start, 6), round(part.end, 6)) for part in segments] == parts
    assert ends == pytest.approx(seek)
