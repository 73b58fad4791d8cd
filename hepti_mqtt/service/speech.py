"""Requests for the text of speech, and their answers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import RequestError
from hepti_mqtt.models.generation import Moments, TokenRules, Verdict
from hepti_mqtt.models.mel import HOP, RATE, log_mel
from hepti_mqtt.models.shapes import fixed_point
from hepti_mqtt.models.speech import BEFORE, ROWS_PER_S, TASKS, SpeechInput
from hepti_mqtt.runtime.coordinator.transcriptions import Transcription
from hepti_mqtt.service import sound
from hepti_mqtt.service.languages import ANY, language_code
from hepti_mqtt.service.silence import has_pause, is_silent
from hepti_mqtt.service.texts import is_int
from hepti_mqtt.service.words import token_times, words_of

if TYPE_CHECKING:
    from hepti_mqtt.service.requests import ModelInput

SILENCE_S: Final = 0.5  # behind the last word, as in what the models have learnt
# By these the reference takes a text for none, or for one to try again.
NO_SPEECH, LOW_SCORE, REPEATS = 0.6, -1.0, 2.4
WORDS: Final = "word"  # the value of `timestamps` for the times of words, too
TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Heard(NamedTuple):
    """A recording: the prompt of its text, the rules for its tokens, its frames [n], and its length.

    start: the token of the prompt where the text is begun, behind what was said before.
    """

    prompt: tuple[int, ...]
    rules: TokenRules
    frames: npt.NDArray[np.int32]
    seconds: float
    start: int
    #: nobody speaks
    silent: bool = False
    #: rows of sound in the recording, if the times of words are wanted, else 0
    sound_rows: int = 0


def read_speech(checkpoint: Checkpoint, reads: SpeechInput, request: Mapping[str, Any]) -> Heard:
    """Return the recording of a request; raises RequestError."""
    tokens, task = checkpoint.speech, request.get("task", TASKS[0])
    language, among = _languages(request.get("language"), tokens.languages or {"en": 0})
    if task not in TASKS or (task != TASKS[0] and not tokens.tasks):
        allowed = TASKS if tokens.tasks else TASKS[:1]
        raise RequestError(f"task must be one of {', '.join(allowed)} for model {checkpoint.model}")
    wanted = request.get("timestamps", False)
    if not isinstance(wanted, bool) and wanted != WORDS:
        raise RequestError(f'timestamps must be true, false or "{WORDS}"')
    timed, has_moments = bool(wanted), tokens.moments > reads.longest
    if timed and not has_moments:
        raise RequestError(f"timestamps must be false: {checkpoint.model} has no tokens of times")
    if wanted == WORDS and not getattr(checkpoint.spec, "alignment", ()):
        raise RequestError(
            f"timestamps must be true or false: generation_config.json of {checkpoint.model} names no alignment_heads "
            "that the model has, and words have no times without them"
        )
    said = _said(checkpoint, reads, request.get("prompt"))
    samples = sound.read("audio", request["audio"], reads.longest / ROWS_PER_S)
    rows = window_rows(reads, len(samples) / RATE, request.get("window"))
    whole = np.zeros(2 * rows * HOP, np.float32)
    whole[: len(samples)] = samples[: len(whole)]
    silent = is_silent(samples)
    # A text without times ends at a pause, although somebody goes on speaking.
    timed = timed or (has_moments and not silent and has_pause(samples))
    prompt, rules = tokens.begin(language, task, timed=timed, said=said, among=among)
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
    return Heard(prompt, rules, frames, len(samples) / RATE, prompt.index(tokens.start), silent, count)


def _languages(value: Any, known: Mapping[str, int]) -> tuple[str | None, list[str]]:
    """Return the language of a request, None to detect it, and of which ones, none for all; raises RequestError."""
    if value in (None, "", ANY, []):
        return None, []
    names = value if isinstance(value, list) else [value]
    codes = [language_code(str(name), known) for name in names]
    if None in codes:
        some = ", ".join(sorted(known)[:120])
        raise RequestError(
            f"language must be one of {some}, or a list of them, not {str(value)[:40]!r}; leave it out to have it "
            "detected",
            "language",
        )
    found = [code for code in codes if code is not None]
    return (found[0], []) if len(found) == 1 else (None, found)


def _said(checkpoint: Checkpoint, reads: SpeechInput, prompt: Any) -> tuple[int, ...]:
    """Return the tokens of what was said before, as many of the last ones as the reference takes; [] is nothing."""
    if prompt in (None, "", []):
        return ()
    tokens = checkpoint.speech
    if tokens.before < 0:
        raise RequestError(f"model {checkpoint.model} has no token {BEFORE} in tokenizer.json; leave prompt out")
    ids, last = list[int](), tokens.plain + tokens.moments
    for part in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(part, str):
            ids += checkpoint.tokenizer.encode(f" {part.strip()}", add_special_tokens=False).ids
        elif part is not prompt and is_int(part) and (0 <= part < tokens.end or tokens.plain < part <= last):
            ids.append(part)
        else:
            raise RequestError("prompt must be a text, or a list of texts and of ids of words and timestamps")
    return tuple(ids[1 - reads.positions // 2 :])


def _temperatures(value: Any) -> tuple[float, ...]:
    found = [value] if isinstance(value, int | float) else value
    fits = isinstance(found, list | tuple) and all(
        isinstance(t, int | float) and not isinstance(t, bool) and 0 <= t <= 1 for t in found
    )
    if not fits or not 1 <= len(found) <= len(TEMPERATURES):
        raise RequestError(
            f"temperature must be a number from 0 to 1, or a list of up to {len(TEMPERATURES)} that are tried in turn"
        )
    return tuple(float(t) for t in found)


def window_rows(reads: SpeechInput, seconds: float, window: Any = None) -> int:
    """Return the rows of the window in which a recording is read: as asked, else as long as it needs.

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
    """Return whether the reference would try again: the text repeats itself or is unlikely, unless nobody speaks."""
    score, compression = _mean(scores), compression_of(_words(checkpoint, tokens).strip())
    again = (compression > REPEATS or score < LOW_SCORE) and not _is_silent(silence, score)
    return Verdict(again, (float(compression <= REPEATS), score))


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / max(len(scores), 1)


def _is_silent(silence: float, score: float) -> bool:
    return silence > NO_SPEECH and score < LOW_SCORE


def compression_of(text: str) -> float:
    """Return how many times as long a text is as what is left of it compressed."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def _words(checkpoint: Checkpoint, tokens: Sequence[int]) -> str:
    """Return the text of words, without times; it begins with a space where a word does."""
    end = checkpoint.speech.end
    return str(checkpoint.tokenizer.decode([token for token in tokens if token < end]))


def transcript(checkpoint: Checkpoint, prepared: ModelInput, generation: Transcription) -> dict[str, Any]:
    """Return the answer: the text, and what is known of how sure it is.

    no_speech: the probability that nobody speaks; where it is high and the text unlikely, the text is empty. score: the
    mean logarithm of the probabilities of tokens. compression: of the text's bytes, high where it repeats itself.
    doubtful: all temperatures were tried, and none gave a better text. segments: where timestamps were asked for, each
    with `words` if their times were; seek: where the last one ends that is whole.
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
    if generation.rules.moments is None:
        return answer
    parts, seek = segments_of(written, generation.rules.moments, prepared.seconds)
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
    """A part of a text: from when to when it is said, in seconds, its tokens, and the place of the first one."""

    start: float
    end: float
    ids: tuple[int, ...]
    first: int = 0


def segments_of(ids: Sequence[int], moments: Moments, seconds: float) -> tuple[list[Segment], float]:
    """Return the segments of a text, and where the last one ends that is whole: there the next window begins.

    A pair of moments ends one segment and begins the next. Words behind the last pair are a segment until the end of
    the sound, and are read again in the next window.
    """
    tokens = [token for token in ids if token != moments.end]
    is_moment = [token >= moments.first for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if is_moment[i - 1] and is_moment[i]]
    ends_in_silence = is_moment[-2:] == [False, True]

    def at(token: int) -> float:
        return min((token - moments.first) / ROWS_PER_S, seconds)

    if not cuts:
        last = next((at(token) for token in reversed(tokens) if token > moments.first), seconds)
        first = at(tokens[0]) if is_moment[:1] == [True] else 0.0
        return ([Segment(min(first, last), last, tuple(tokens))] if not all(is_moment) else []), seconds
    found, before = list[Segment](), 0
    for cut in [*cuts, *([len(tokens)] if ends_in_silence else [])]:
        part = tokens[before:cut]
        found.append(Segment(at(part[0]), at(part[-1]), tuple(part), before))
        before = cut
    seek = seconds if ends_in_silence else at(tokens[before - 1])
    if rest := [token for token in tokens[before:] if token < moments.first]:
        found.append(Segment(at(tokens[before]), seconds, tuple(rest), len(tokens) - len(rest)))
    return [part for part in found if any(token < moments.first for token in part.ids)], seek
