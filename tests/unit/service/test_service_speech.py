"""Requests for the text of a recording: prompts, rules of tokens, segments, and words with their times."""

import base64
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from question_cases import put
from word_cases import ANSWERS, TEXTS, bytes_tokenizer

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.errors import HeptiError, ModelError, RequestError
from hepti_mqtt.models.generation import TimeTokens, TokenRules
from hepti_mqtt.models.mel import RATE, log_mel
from hepti_mqtt.models.shapes import STEP
from hepti_mqtt.models.speech import SpeechInput
from hepti_mqtt.runtime.coordinator.texts import TextSoFar
from hepti_mqtt.runtime.coordinator.transcriptions import Attempt, Transcription
from hepti_mqtt.service import sound
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.languages import NAMES, language_code
from hepti_mqtt.service.requests import ModelInput, read_input
from hepti_mqtt.service.speech import judge, segments_of, window_rows
from hepti_mqtt.service.word_times import TokenTimes, split_words, token_times, words_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with Checkpoint.open(make_model("tiny-whisper", tmp_path_factory.mktemp("speech") / "m")) as opened:
        yield opened


TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(4800) / RATE)).astype(np.float32)
AUDIO = {"audio": base64.b64encode(sound.wav_of(TONE)).decode()}


def test_a_request_is_the_prompt_and_the_frames_of_its_window(checkpoint):
    reads, tokens = checkpoint.spec.input_spec, checkpoint.speech
    prepared = read_input(checkpoint, {**AUDIO, "language": "de"})
    assert prepared.shape == reads.run(4, reads.longest)
    assert prepared.inputs.shape == reads.input_layout(prepared.shape)[0]
    steering = [tokens.start, tokens.languages["de"], tokens.tasks["transcribe"], tokens.plain]
    assert prepared.inputs[:5].tolist() == [0, *steering]
    whole = np.zeros(2 * reads.longest * 160, np.float32)
    whole[:4800] = TONE
    frames = log_mel(whole, reads.bands)
    np.testing.assert_allclose(prepared.inputs[5:] * STEP, frames.reshape(-1), atol=1e-3)  # 16 bits a sample
    prepared_input = read_input(checkpoint, AUDIO)
    assert prepared_input.inputs[:2].tolist() == [0, tokens.start], "the language ends the prompt"
    assert prepared_input.rules.choices == tuple(tokens.languages.values())
    assert prepared_input.rules.temperatures == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert prepared_input.rules.forced == (tokens.tasks["transcribe"], tokens.plain)


def test_the_text_of_silence_is_empty(checkpoint):
    for samples, silent in ((np.zeros(RATE // 4, np.float32), True), (TONE[:4000], False)):
        audio = base64.b64encode(sound.wav_of(samples)).decode()
        prepared = read_input(checkpoint, {"audio": audio})
        assert prepared.silent is silent
        if silent:
            assert prepared.new_tokens == 1
            generation = Transcription((1,), 1, prepared.shape, prepared.rules, text=TextSoFar([5], [0.0]))
            answer = decode_output(checkpoint, prepared, np.array([5]), generation=generation)
            assert (answer["text"], answer["seconds"]) == ("", 0.25)


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A model with the tokens of times."""
    with Checkpoint.open(make_model("tiny-whisper-turbo", tmp_path_factory.mktemp("speech") / "m")) as opened:
        yield opened


def test_what_was_said_before_comes_before_the_prompt(timed):
    reads, tokens = timed.spec.input_spec, timed.speech
    light = timed.tokenizer.token_to_id("light")
    request = {**AUDIO, "language": "en", "timestamps": True, "prompt": ["light", tokens.plain + 3, "light"]}
    prepared_input = read_input(timed, request)
    said = [tokens.before, light, tokens.plain + 3, light]
    steering = [tokens.start, tokens.languages["en"], tokens.tasks["transcribe"]]
    assert prepared_input.inputs[: 1 + prepared_input.shape.new_rows].tolist() == [0, *said, *steering]
    assert prepared_input.shape == reads.run(7, reads.longest, start=4)
    assert prepared_input.rules.times == TimeTokens(tokens.plain + 1, tokens.end, tokens.plain, 50)
    longer = read_input(timed, {**request, "prompt": [light] * 99})
    assert longer.shape.start == 1 + reads.positions // 2 - 1, "as many as the reference takes"
    unknown = read_input(timed, {**AUDIO, "prompt": "light"})
    assert (unknown.rules.opening, unknown.inputs[1]) == ((tokens.before, light), tokens.start)


def test_a_text_with_times_has_segments(timed):
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


def test_times_of_words_are_asked_of_the_rows_with_sound(timed):
    request = {**AUDIO, "language": "en", "timestamps": "word"}
    prepared_input = read_input(timed, request)
    assert prepared_input.sound_rows == 15, "0.3 s"
    assert prepared_input.rules.times is not None
    assert read_input(timed, {**request, "timestamps": True}).sound_rows == 0


def test_a_model_with_the_alignment_heads_of_its_teacher_has_no_times_of_words(tmp_path):
    path = make_model("tiny-whisper-turbo", tmp_path / "m")
    put("generation_config.json", alignment_heads=[[25, 3]])(path)
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
def test_a_model_that_hears_or_writes_otherwise_is_refused(tmp_path, name, values):
    path = make_model("tiny-whisper", tmp_path / "m")
    if "num_beams" in values:
        (path / GENERATION).unlink()
    put(name, **values)(path)
    with pytest.raises(ModelError), Checkpoint.open(path) as opened:
        _ = opened.speech


@pytest.mark.parametrize("prompt", [[3.5], [True], [[1]], {"a": 1}, 7, [96 + 1], ["light", -1]], ids=str)
def test_a_prompt_that_is_no_text_is_refused(timed, prompt):
    with pytest.raises(RequestError):
        read_input(timed, {**AUDIO, "prompt": prompt})


WRONG = {
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
def test_what_speech_does_not_know_is_refused(checkpoint, key, value):
    with pytest.raises(RequestError):
        read_input(checkpoint, {**AUDIO, key: value})


def test_other_models_hear_nothing(tmp_path):
    with Checkpoint.open(make_model("tiny-bert", tmp_path / "b")) as words:
        for request in (AUDIO, {"text": "a", "language": "en"}):
            with pytest.raises(HeptiError):
                read_input(words, request)


def test_windows_come_in_steps():
    reads = SpeechInput(100, 80, 1500, 448)
    assert [window_rows(reads, s) for s in (0.1, 9.4, 9.6, 12.0, 29.9, 30.0)] == [500, 500, 600, 700, 1500, 1500]
    assert window_rows(reads, 3.0, 30) == 1500
    assert window_rows(reads, 3.0, 10.5) == 525


def answered(checkpoint, tokens, scores, silence):
    steering, rules = checkpoint.speech.begin("en", "transcribe")
    shape = checkpoint.spec.input_spec.run(len(steering), 24)
    verdict = judge(checkpoint, tokens, scores, silence)
    text = TextSoFar(tokens, scores)
    tried = [Attempt(text, verdict)]
    generation = Transcription(steering, 8, shape, rules, text=text, silence=silence, tried=tried)
    prepared = ModelInput(shape, np.empty(0), False, 5, new_tokens=8, rules=rules, seconds=0.3)
    return decode_output(checkpoint, prepared, np.array(tokens), None, generation)


def test_an_answer_says_how_sure_it_is(checkpoint):
    end, word = checkpoint.speech.end, checkpoint.tokenizer.token_to_id("light")
    sure = answered(checkpoint, [word, end], [-0.1, -0.3], 0.1)
    assert (sure["text"], sure["language"], sure["doubtful"]) == ("light", "en", False)
    assert sure["score"] == pytest.approx(-0.2)
    assert answered(checkpoint, [word, end], [-2.0, -2.0], 0.1)["doubtful"]
    assert answered(checkpoint, [word] * 60, [-0.1] * 60, 0.1)["doubtful"], "it repeats itself"
    silent = answered(checkpoint, [word, end], [-2.0, -2.0], 0.9)
    assert (silent["text"], silent["doubtful"]) == ("", False)


def test_tokens_are_chosen_by_the_rules():
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
def test_moments_come_in_pairs_and_in_order(before, allowed):
    rules = TokenRules(times=TimeTokens(ZERO, END, PLAIN, 2))
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
def test_segments_lie_between_moments(ids, parts, seek):
    segments, ends = segments_of(ids, TimeTokens(ZERO, END, PLAIN, 2), 0.16)
    assert [(round(part.start, 6), round(part.end, 6)) for part in segments] == parts
    assert ends == pytest.approx(seek)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("en", "en"), ("nb-NO", "no"), ("iw", "he"), ("jv", "jw"), ("zh-TW", "zh"), ("zh_Hant_TW", "zh"),
        ("EN-us", "en"), ("english", "en"), ("German", "de"), ("xx", None), ("", None), ("auto", None),
    ],
)  # fmt: skip
def test_codes_and_names_of_languages(value, code):
    assert language_code(value, NAMES) == code


# Words of a transcript: those of the reference, with the times of their tokens.

REFERENCE = json.loads(ANSWERS.read_text())
LAST = 1000


@pytest.fixture(scope="module")
def words():
    return SimpleNamespace(tokenizer=bytes_tokenizer(), speech=SimpleNamespace(end=LAST))


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, _, text in TEXTS], ids=str)
def test_words_are_those_of_the_reference(words, code, text):
    ids = words.tokenizer.encode(text).ids
    word_list = split_words(words, code, ids)
    assert [word.text for word in word_list] == REFERENCE[text]
    assert [*(word.first for word in word_list), len(ids)] == [0, *(word.stop for word in word_list)], (
        "no token is left out"
    )


def test_no_word_is_lost_behind_a_broken_character(words):
    text = "one \ufffd two"
    ids = words.tokenizer.encode(text).ids
    word_list = split_words(words, "en", ids)
    assert word_list[0].text == "one"
    assert (word_list[-1].text[-4:], word_list[-1].stop) == (" two", len(ids))


def test_a_word_lasts_from_its_first_token_to_its_last_one(words):
    first = words.tokenizer.encode("ab cd").ids
    ids = [LAST + 5, *first, LAST + 9, LAST]  # moments before and behind
    beginnings = np.array([0, 3, 7, 9, 12, 20, 22], np.float32)
    times = token_times(ids, beginnings)
    assert times[1] == TokenTimes(0.0, 0.06)
    assert times[-1] == TokenTimes(0.44, 0.44), "nothing is known of the last token"
    assert words_of(words, "en", ids, times) == [
        {"word": "ab", "start": 0.0, "end": 0.14},
        {"word": " cd", "start": 0.14, "end": 0.4},
    ]


def test_a_text_without_tokens_has_no_words(words):
    assert words_of(words, "en", [LAST], token_times([LAST], None)) == []
