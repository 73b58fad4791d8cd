"""Requests for the text of speech, and their answers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import RequestError
from hepti_mqtt.models.generation import TokenRules
from hepti_mqtt.models.mel import HOP, RATE, log_mel
from hepti_mqtt.models.speech import ROWS_PER_S, TASKS, SpeechInput, fixed_point
from hepti_mqtt.runtime.coordinator.requests import Generation
from hepti_mqtt.service import sound

if TYPE_CHECKING:
    from hepti_mqtt.service.requests import ModelInput

SILENCE_S: Final = 0.5  # behind the last word, as in what the models have learnt
# By these the reference takes a text for none, or for one to try again.
NO_SPEECH, LOW_SCORE, REPEATS = 0.6, -1.0, 2.4


class Heard(NamedTuple):
    """A recording: the prompt of its text, the rules for its tokens, its frames [n], and its length."""

    prompt: tuple[int, ...]
    rules: TokenRules
    frames: npt.NDArray[np.int32]
    seconds: float


def read_speech(checkpoint: Checkpoint, reads: SpeechInput, request: Mapping[str, Any]) -> Heard:
    """Return the recording of a request; raises RequestError."""
    tokens = checkpoint.speech
    language, task = request.get("language"), request.get("task", TASKS[0])
    known = tokens.languages or {"en": 0}
    if language is not None and language not in known:
        some = ", ".join(sorted(known)[:120])
        raise RequestError(f"language must be one of {some}, not {str(language)[:40]!r}; leave it out to have it found")
    if task not in TASKS or (task != TASKS[0] and not tokens.tasks):
        allowed = TASKS if tokens.tasks else TASKS[:1]
        raise RequestError(f"task must be one of {', '.join(allowed)} for model {checkpoint.model}")
    longest_s = reads.longest / ROWS_PER_S
    samples = sound.read("audio", request["audio"], longest_s)
    rows = window_rows(reads, len(samples) / RATE, request.get("window"))
    whole = np.zeros(2 * rows * HOP, np.float32)
    whole[: len(samples)] = samples[: len(whole)]
    prompt, rules = tokens.begin(language, task)
    return Heard(prompt, rules, fixed_point(log_mel(whole, reads.bands)), len(samples) / RATE)


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


def transcript(checkpoint: Checkpoint, prepared: ModelInput, generation: Generation) -> dict[str, Any]:
    """Return the answer: the text, and what is known of how sure it is.

    no_speech: the probability that nobody speaks; where it is high and the text unlikely, the text is empty. score: the
    mean logarithm of the probabilities of tokens. compression: of the text's bytes, high where it repeats itself.
    doubtful: the reference would try again.
    """
    rules, tokens = generation.rules, checkpoint.speech
    steering, written = generation.tokens[: rules.before_text], generation.tokens[rules.before_text :]
    scores = generation.scores[rules.before_text :]
    score = sum(scores) / max(len(scores), 1)
    text = checkpoint.tokenizer.decode(written, skip_special_tokens=True).strip()
    data = text.encode()
    compression = len(data) / len(zlib.compress(data)) if data else 0.0
    silence = generation.silence or 0.0
    is_silent = silence > NO_SPEECH and score < LOW_SCORE
    spoken = steering[:1] or [i for i in generation.prompt if i in tokens.languages.values()]
    codes = {i: code for code, i in tokens.languages.items()}
    return {
        "text": "" if is_silent else text,
        "language": codes[spoken[0]] if spoken else "en",
        "seconds": prepared.seconds,
        "no_speech": silence,
        "score": score,
        "compression": compression,
        "doubtful": not is_silent and (score < LOW_SCORE or compression > REPEATS),
        "ids": list(generation.tokens),
    }
