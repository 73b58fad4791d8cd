"""Sampling and stop options of a request, with the names of OpenAI and transformers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.models.generation import Sampling, TokenRules
from hepti_mqtt.service.detokenizer import WrittenText
from hepti_mqtt.service.options import MAX_STOPS
from hepti_mqtt.service.texts import describe, quoted

LONGEST_STOP: Final = 200  # characters
MAX_LIKELY_IN_ALL: Final = 24_000  # in an answer, to fit into the packets that brokers accept
MAX_BIASED: Final = 1024


def read_sampling(
    checkpoint: Checkpoint, request: Mapping[str, Any], rules: TokenRules, prompt: Sequence[int], vocab: int
) -> tuple[TokenRules, tuple[str, ...]]:
    """Return the token rules of a text and its stop texts; raises RequestError for invalid options.

    request: with checked options; defaults come from the model's files. prompt: its tokens.
    """
    defaults = checkpoint.sampling_defaults
    if request.get("temperature") == 0:  # greedy decoding ignores the default filters
        defaults = {key: value for key, value in defaults.items() if key == "repetition_penalty"}
    request = {**defaults, **request}
    if request.get("top_p") == 0:
        raise RequestError("top_p must be above 0", "top_p")
    if isinstance(request.get("temperature"), list):
        raise RequestError("temperature must be one number: lists are for speech", "temperature")
    repetition = float(request.get("repetition_penalty", 1.0))
    changed = Sampling(
        repetition=repetition,
        presence=float(request.get("presence_penalty", 0.0)),
        frequency=float(request.get("frequency_penalty", 0.0)),
        bias=_bias(request.get("logit_bias"), vocab),
        top_k=int(request.get("top_k", 0)),
        top_p=float(request.get("top_p", 1.0)),
        min_p=float(request.get("min_p", 0.0)),
        prompt=tuple(prompt) if repetition != 1.0 else (),
    )
    stop = _stop(checkpoint, request.get("stop"))
    return replace(
        rules,
        temperatures=(float(request.get("temperature", 0.0)),),
        seed=request["seed"] if "seed" in request else random.getrandbits(32),
        sampling=rules.sampling if changed == Sampling() else changed,
        stops=WrittenText(checkpoint, stop).stops if stop else None,
        likely=request.get("logprobs", -1),
    ), stop


def _bias(value: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping) or len(value) > MAX_BIASED:
        raise RequestError(
            f"logit_bias must be an object of at most {MAX_BIASED} token ids, not {describe(value)}", "logit_bias"
        )
    bias = []
    for token, added in value.items():
        if not (str(token).isascii() and str(token).isdigit() and int(token) < vocab):
            raise RequestError(f"logit_bias names {quoted(token)}; tokens are 0 to {vocab - 1}", "logit_bias")
        if isinstance(added, bool) or not isinstance(added, int | float) or not -100 <= added <= 100:
            raise RequestError(
                f"logit_bias of {token} must be a number from -100 to 100, not {describe(added)}", "logit_bias"
            )
        bias.append((int(token), float(added)))
    return tuple(bias)


def _stop(checkpoint: Checkpoint, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    fits = isinstance(texts, list) and len(texts) <= MAX_STOPS
    if not fits or not all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in texts):
        raise RequestError(
            f"stop must be a text, or a list of up to {MAX_STOPS}, of 1 to {LONGEST_STOP} characters each", "stop"
        )
    if texts and not checkpoint.has_tokenizer:
        raise RequestError(f"model {checkpoint.model} has no tokenizer, so stop does not apply; leave it out")
    return tuple(texts)
