"""How a request wants its text drawn and ended: the options of OpenAI and transformers, checked."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.errors import RequestError
from hepti_mqtt.models.generation import RANGES, Sampling, TokenRules
from hepti_mqtt.service.texts import describe, is_int, quoted
from hepti_mqtt.service.written import WrittenText

MAX_SEED: Final = 2**32 - 1
MAX_STOPS: Final = 16
LONGEST_STOP: Final = 200  # characters
MAX_LIKELY: Final = 20
MAX_LIKELY_IN_ALL: Final = 24_000  # in an answer: more do not fit into the packets that brokers take
MAX_BIASED: Final = 1024
OPTIONS: Final = (*RANGES, "seed", "logit_bias", "stop", "logprobs", "speculate")


def read_sampling(
    checkpoint: Checkpoint, request: Mapping[str, Any], rules: TokenRules, prompt: Sequence[int], vocab: int
) -> tuple[TokenRules, tuple[str, ...]]:
    """Return the rules of a text and the texts at which it stops; raises RequestError naming what is wrong.

    prompt: its tokens. What the request does not say is as the model's files have it.
    """
    number = {key: _number(request, key) for key in RANGES} | {"top_k": request.get("top_k")}
    for key, value in checkpoint.sampling_defaults.items():
        is_of_draws = key not in ("temperature", "repetition_penalty")
        if number[key] is None and not (is_of_draws and number["temperature"] == 0):
            number[key] = value
    if number["top_p"] == 0:
        raise RequestError("top_p must be above 0")
    changed = Sampling(
        repetition=_or(number["repetition_penalty"], 1.0),
        presence=_or(number["presence_penalty"], 0.0),
        frequency=_or(number["frequency_penalty"], 0.0),
        bias=_bias(request.get("logit_bias"), vocab),
        top_k=int(_or(number["top_k"], 0)),
        top_p=_or(number["top_p"], 1.0),
        min_p=_or(number["min_p"], 0.0),
        prompt=tuple(prompt) if number["repetition_penalty"] not in (None, 1.0) else (),
    )
    stop = _stop(checkpoint, request.get("stop"))
    return replace(
        rules,
        temperatures=(_or(number["temperature"], 0.0),),
        seed=read_seed(request.get("seed")),
        sampling=rules.sampling if changed == Sampling() else changed,
        stops=WrittenText(checkpoint, stop).stops if stop else None,
        likely=_likely(request.get("logprobs")),
    ), stop


def read_seed(value: Any) -> int:
    """Return a request's seed, another one each time where it names none; raises RequestError."""
    if value is None:
        return random.getrandbits(32)
    if not is_int(value) or not 0 <= value <= MAX_SEED:
        raise RequestError(f"seed must be an integer from 0 to {MAX_SEED}, not {describe(value)}")
    return int(value)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _number(request: Mapping[str, Any], key: str) -> float | None:
    value, (low, high) = request.get(key), RANGES[key]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(f"{key} must be a number from {low:g} to {high:g}, not {describe(value)}")
    return float(value)


def _likely(value: Any) -> int:
    if value is None:
        return -1
    if not is_int(value) or not 0 <= value <= MAX_LIKELY:
        raise RequestError(f"logprobs must be an integer from 0 to {MAX_LIKELY}, not {describe(value)}")
    return int(value)


def _bias(value: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping) or len(value) > MAX_BIASED:
        raise RequestError(f"logit_bias must be an object of at most {MAX_BIASED} token ids, not {describe(value)}")
    found = []
    for token, added in value.items():
        if not (str(token).isascii() and str(token).isdigit() and int(token) < vocab):
            raise RequestError(f"logit_bias names {quoted(token)}; tokens are 0 to {vocab - 1}")
        if isinstance(added, bool) or not isinstance(added, int | float) or not -100 <= added <= 100:
            raise RequestError(f"logit_bias of {token} must be a number from -100 to 100, not {describe(added)}")
        found.append((int(token), float(added)))
    return tuple(found)


def _stop(checkpoint: Checkpoint, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    fits = isinstance(found, list) and len(found) <= MAX_STOPS
    if not fits or not all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in found):
        raise RequestError(
            f"stop must be a text, or a list of up to {MAX_STOPS}, of 1 to {LONGEST_STOP} characters each"
        )
    if found and not checkpoint.has_tokenizer:
        raise RequestError(
            f"model {checkpoint.model} has no tokenizer, so it writes no text that could stop; leave it out"
        )
    return tuple(found)
