"""Read transcription requests, and write their answers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.core.spec import Want
from hepti_mqtt.models.generation import TimeTokens, Verdict
from hepti_mqtt.models.mel import HOP, RATE, log_mel
from hepti_mqtt.models.shapes import fixed_point
from hepti_mqtt.models.speech import BEFORE, ROWS_PER_S, TASKS, SpeechInput
from hepti_mqtt.runtime.coordinator.transcriptions import Transcription
from hepti_mqtt.service import sound
from hepti_mqtt.service.languages import ANY, language_code
from hepti_mqtt.service.requests import DEFAULT_TOP_K, ModelInput
from hepti_mqtt.service.silence import has_pause, is_silent
from hepti_mqtt.service.texts import is_int
from hepti_mqtt.service.word_times import token_times, words_of

SILENCE_S: Final = 0.5  # after the last word, as in the models' training data
# Thresholds of openai/whisper: a text without speech, and a text to decode again at a higher temperature.
NO_SPEECH, LOW_SCORE, REPEATS = 0.6, -1.0, 2.4
WORDS: Final = "word"  # value of `timestamps` that also wants times of words
TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def read_speech(
    checkpoint: Checkpoint, reads: SpeechInput, request: Mapping[str, Any], want: Want, computes: bool
) -> ModelInput:
    """Return a recording's input: the prompt tokens of its text, then its frames; raises RequestError."""
    if wrong := [key for key in ("truncate", "empty", "top_k") if key in request]:
        raise RequestError(f"{' and '.join(wrong)} does not apply to speech; leave it out")
    tokens, task = checkpoint.speech, request.get("task", TASKS[0])
    language, among = _languages(request.get("language"), tokens.languages or {"en": 0})
    if task not in TASKS or (task != TASKS[0] and not tokens.tasks):
        allowed = TASKS if tokens.tasks else TASKS[:1]
        raise RequestError(f"task must be one of {', '.join(allowed)} for model {checkpoint.model}")
    wanted = request.get("timestamps", False)
    if not isinstance(wanted, bool) and wanted != WORDS:
        raise RequestError(f'timestamps must be true, false or "{WORDS}"')
    timed, has_times = bool(wanted), tokens.time_count > reads.longest
    if timed and not has_times:
        raise RequestError(f"timestamps must be false: {checkpoint.model} has no timestamp tokens")
    if wanted == WORDS and not getattr(checkpoint.spec, "alignment", ()):
        raise RequestError(
            f"timestamps must be true or false: generation_config.json of {checkpoint.model} names no alignment_heads "
            "of the model, and times of words need them"
        )
    previous = _previous_tokens(checkpoint, reads, request.get("prompt"))
    samples = sound.read("audio", request["audio"], reads.longest / ROWS_PER_S)
    rows = window_rows(reads, len(samples) / RATE, request.get("window"))
    whole = np.zeros(2 * rows * HOP, np.float32)
    whole[: len(samples)] = samples[: len(whole)]
    silent = is_silent(samples)
    # Without timestamps, the model ends the text at a pause although speech continues.
    timed = timed or (has_times and not silent and has_pause(samples))
    prompt, rules = tokens.begin(language, task, timed=timed, said=previous, among=among)
    rules = replace(
        rules,
        temperatures=_temperatures(request.get("temperature", TEMPERATURES)),
        seed=request.get("seed", 0),
        judge=partial(judge, checkpoint),
    )
    if silent:
        rules = replace(rules, temperatures=(0.0,), judge=None)
    frames = fixed_point(log_mel(whole, reads.bands))
    count = min(max(-(-len(samples) // HOP) // 2, 1), rows) if wanted == WORDS else 0
    room = reads.positions - len(prompt) - rules.before_text
    requested = request.get("max_new_tokens", min(reads.positions // 2, room))
    if requested > room:
        raise RequestError(f"max_new_tokens must be an integer from 1 to {room}, not {requested}", "max_new_tokens")
    return ModelInput(
        reads.run(len(prompt), len(frames) // (2 * reads.bands), want, prompt.index(tokens.start)),
        np.concatenate([np.array([0, *prompt], np.int32), frames]),
        False,
        DEFAULT_TOP_K,
        computes,
        (1 if silent else requested) if want == "task" else 0,
        rules=rules,
        seconds=len(samples) / RATE,
        silent=silent,
        sound_rows=count,
    )


def _languages(value: Any, supported: Mapping[str, int]) -> tuple[str | None, list[str]]:
    """Return the language, or None and the languages to detect among (empty: all); raises RequestError."""
    if value in (None, "", ANY, []):
        return None, []
    names = value if isinstance(value, list) else [value]
    codes = [language_code(str(name), supported) for name in names]
    if None in codes:
        some = ", ".join(sorted(supported)[:120])
        raise RequestError(
            f"language must be one of {some}, or a list of them, not {str(value)[:40]!r}; leave it out to detect it",
            "language",
        )
    chosen = [code for code in codes if code is not None]
    return (chosen[0], []) if len(chosen) == 1 else (None, chosen)


def _previous_tokens(checkpoint: Checkpoint, reads: SpeechInput, prompt: Any) -> tuple[int, ...]:
    """Return the last tokens of the previous text, as many as openai/whisper uses."""
    if prompt in (None, "", []):
        return ()
    tokens = checkpoint.speech
    if tokens.before < 0:
        raise RequestError(f"model {checkpoint.model} has no token {BEFORE} in tokenizer.json; leave prompt out")
    ids, last = list[int](), tokens.plain + tokens.time_count
    for part in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(part, str):
            ids += checkpoint.tokenizer.encode(f" {part.strip()}", add_special_tokens=False).ids
        elif part is not prompt and is_int(part) and (0 <= part < tokens.end or tokens.plain < part <= last):
            ids.append(part)
        else:
            raise RequestError("prompt must be a text, or a list of texts and of ids of words and timestamps")
    return tuple(ids[1 - reads.positions // 2 :])


def _temperatures(value: Any) -> tuple[float, ...]:
    values = [value] if isinstance(value, int | float) else value
    fits = isinstance(values, list | tuple) and all(
        isinstance(t, int | float) and not isinstance(t, bool) and 0 <= t <= 1 for t in values
    )
    if not fits or not 1 <= len(values) <= len(TEMPERATURES):
        raise RequestError(
            f"temperature must be a number from 0 to 1, or a list of up to {len(TEMPERATURES)} to try in turn"
        )
    return tuple(float(t) for t in values)


def window_rows(reads: SpeechInput, seconds: float, window: Any = None) -> int:
    """Return the rows of a recording's window: of the requested length, else just long enough.

    Raises RequestError for a window that is too short or too long.
    """
    longest_s = reads.longest / ROWS_PER_S
    if window is not None:
        wanted_s = float(window) if isinstance(window, int | float) and not isinstance(window, bool) else 0.0
        least_s = max(seconds, reads.positions / ROWS_PER_S)
        if not least_s <= wanted_s <= longest_s:
            raise RequestError(f"window must be a number of seconds from {least_s:.2f} to {longest_s:g}")
        return min(ceil(wanted_s * ROWS_PER_S), reads.longest)
    return reads.window(ceil((seconds + SILENCE_S) * ROWS_PER_S))


def judge(checkpoint: Checkpoint, tokens: Sequence[int], scores: Sequence[float], silence: float) -> Verdict:
    """Return whether to decode again: the text is repetitive or improbable, and the recording contains speech."""
    score, compression = _mean(scores), compression_of(_words(checkpoint, tokens).strip())
    again = (compression > REPEATS or score < LOW_SCORE) and not _is_silent(silence, score)
    return Verdict(again, (float(compression <= REPEATS), score))


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / max(len(scores), 1)


def _is_silent(silence: float, score: float) -> bool:
    return silence > NO_SPEECH and score < LOW_SCORE


def compression_of(text: str) -> float:
    """Return the ratio of a text's size to its compressed size."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def _words(checkpoint: Checkpoint, tokens: Sequence[int]) -> str:
    """Return the text of word tokens, without timestamps; it keeps a leading space."""
    end = checkpoint.speech.end
    return str(checkpoint.tokenizer.decode([token for token in tokens if token < end]))


def transcript(checkpoint: Checkpoint, prepared: ModelInput, generation: Transcription) -> dict[str, Any]:
    """Return the answer: the text and its confidence.

    no_speech: probability of no speech; if it is high and the text improbable, the text is empty. score: mean log
    probability of the tokens. compression: compression ratio of the text, high if the text is repetitive. doubtful: no
    temperature gave a better text. segments: if the request wants timestamps, with `words` if it wants their times.
    seek: end of the last complete segment.
    """
    tokens, written = checkpoint.speech, generation.text.tokens
    text, score, silence = _words(checkpoint, written).strip(), _mean(generation.text.scores), generation.silence or 0.0
    is_empty = prepared.silent or _is_silent(silence, score)
    codes = {i: code for code, i in tokens.languages.items()}
    spoken = [codes[i] for i in generation.prompt if i in codes]
    answer = {
        "text": "" if is_empty else text,
        "language": spoken[0] if spoken else "en",
        "seconds": prepared.seconds,
        "no_speech": silence,
        "score": score,
        "compression": compression_of(text),
        "temperature": generation.text.temperature,
        "doubtful": generation.verdict is not None and generation.verdict.again,
        "ids": list(written),
    }
    if generation.rules.times is None:
        return answer
    parts, seek = segments_of(written, generation.rules.times, prepared.seconds)
    segments: list[dict[str, Any]] = [
        {"start": part.start, "end": part.end, "text": _words(checkpoint, part.ids), "ids": list(part.ids)}
        for part in parts
    ]
    if prepared.sound_rows and parts:
        times = token_times(written, generation.beginnings)
        for part, segment in zip(parts, segments, strict=True):
            segment["words"] = words_of(checkpoint, str(answer["language"]), part.ids, times[part.first :])
    return answer | ({"seek": prepared.seconds, "segments": []} if is_empty else {"seek": seek, "segments": segments})


class Segment(NamedTuple):
    """A part of a transcript."""

    start: float  #: seconds
    end: float
    ids: tuple[int, ...]
    first: int = 0  #: index of the first token in the text


def segments_of(ids: Sequence[int], times: TimeTokens, seconds: float) -> tuple[list[Segment], float]:
    """Return the segments of a text, and the end of the last complete segment, where the next window starts.

    A pair of timestamps ends a segment and starts the next. Words after the last pair form a segment until the end of
    the sound, and the next window transcribes them again.
    """
    tokens = [token for token in ids if token != times.end]
    is_time = [token >= times.first for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    ends_in_silence = is_time[-2:] == [False, True]

    def seconds_of(token: int) -> float:
        return min((token - times.first) / ROWS_PER_S, seconds)

    if not cuts:
        last = next((seconds_of(token) for token in reversed(tokens) if token > times.first), seconds)
        first = seconds_of(tokens[0]) if is_time[:1] == [True] else 0.0
        return ([Segment(min(first, last), last, tuple(tokens))] if not all(is_time) else []), seconds
    segments, start = list[Segment](), 0
    for cut in [*cuts, *([len(tokens)] if ends_in_silence else [])]:
        segment = tokens[start:cut]
        segments.append(Segment(seconds_of(segment[0]), seconds_of(segment[-1]), tuple(segment), start))
        start = cut
    seek = seconds if ends_in_silence else seconds_of(tokens[start - 1])
    if rest := [token for token in tokens[start:] if token < times.first]:
        segments.append(Segment(seconds_of(tokens[start]), seconds, tuple(rest), len(tokens) - len(rest)))
    return [segment for segment in segments if any(token < times.first for token in segment.ids)], seek
