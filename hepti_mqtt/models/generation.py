"""What a model's files say of the text that it generates: where it ends, and what else would change it.

Unless a request asks for other tokens, the most likely one follows, so what only shapes a sampled text has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.models.config import JsonConfig, KeyTable

FILE: Final = "generation_config.json"

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "diversity_penalty": (0, 0.0),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1, 1.0),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "watermarking_config": ({},),
}
# Of a sampled text, of several texts, of its length (which a request names), of what else is returned, of speed.
_WITHOUT_EFFECT: Final = frozenset({
    "_from_model_config", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_ensemble_weight", "assistant_lookbehind",
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "do_sample", "early_stopping", "epsilon_cutoff", "eta_cutoff",
    "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_length", "max_matching_ngram_size",
    "max_new_tokens", "max_time", "min_p", "monitor_progress", "name_or_path", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "remove_invalid_values", "renormalize_logits", "return_dict_in_generate", "speculation_type", "target_lookbehind",
    "temperature", "top_h", "top_k", "top_p", "transformers_version", "typical_p", "use_cache", "use_mtp",
})  # fmt: skip
_KEYS: Final = KeyTable(frozenset({"eos_token_id"}), _WITHOUT_EFFECT, _NEUTRAL)
_STEERING: Final = {"begin_suppress_tokens", "forced_decoder_ids", "suppress_tokens"}  # a request says what is forced
_SPEECH_KEYS: Final = KeyTable(
    frozenset(), only={key: values for key, values in _NEUTRAL.items() if key not in _STEERING}, closed=False
)
_OLD_KEYS: Final = KeyTable(frozenset(), only=_NEUTRAL, closed=False)  # where config.json has them


class Verdict(NamedTuple):
    """What a text is worth: whether another one should be tried, and how good it is beside others that were tried."""

    again: bool
    worth: tuple[float, ...]


Judge = Callable[[Sequence[int], Sequence[float], float], Verdict]  # tokens, their scores, the probability of silence


@dataclass(frozen=True, slots=True)
class Moments:
    """Tokens that say when something is said: from `first` on, one for each step of time; they come in pairs.

    end: of a text; its words are below. plain: the token of texts without moments. latest: steps until the first one.
    """

    first: int
    end: int
    plain: int
    latest: int

    def allow(self, row: npt.NDArray[Any], before: Sequence[int]) -> None:
        """Set to -inf what may not follow the tokens of a text so far; row: logits [V]."""
        row[self.plain] = -np.inf
        after_moment = bool(before) and before[-1] >= self.first
        after_pair = after_moment and (len(before) < 2 or before[-2] >= self.first)
        if after_pair:
            row[self.first :] = -np.inf
        elif after_moment:
            row[: self.end] = -np.inf
        if (said := next((token for token in reversed(before) if token >= self.first), None)) is not None:
            row[self.first : said + (0 if after_moment and not after_pair else 1)] = -np.inf
        if not before:
            row[: self.first] = -np.inf
            row[self.first + self.latest + 1 :] = -np.inf
        words, moments = row[: self.first].max(), row[self.first :]
        top = moments.max(initial=-np.inf)
        if np.isfinite(top) and top + np.log(np.exp(moments - top, dtype=np.float64).sum()) > words:
            row[: self.first] = -np.inf


@dataclass(frozen=True, slots=True)
class Sampling:
    """What changes the probabilities of tokens, in this order; as it is here, nothing does. Source: transformers.

    repetition: by which logits above 0 of tokens that were there are divided, and those below multiplied; of `prompt`,
    too. presence, frequency: are taken from logits of the text's own tokens, once and for each time. bias: is added to
    tokens' logits. Of the scaled logits the first `top_k` count (0: all), of those the likeliest that have `top_p`
    together, and of those what has at least `min_p` of the likeliest one's probability.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    prompt: tuple[int, ...] = ()

    def shift(self, row: npt.NDArray[Any], before: Sequence[int]) -> None:
        """Change the logits [V] of what may follow the tokens of a text so far."""
        if self.repetition != 1:
            seen = np.unique([*self.prompt, *before]).astype(np.intp)
            row[seen] = np.where(row[seen] < 0, row[seen] * self.repetition, row[seen] / self.repetition)
        if before and (self.presence or self.frequency):
            seen, counts = np.unique(np.asarray(before, np.intp), return_counts=True)
            row[seen] -= self.presence + self.frequency * counts
        for token, added in self.bias:
            row[token] += added

    def narrow(self, row: npt.NDArray[np.float64]) -> None:
        """Set to -inf what is left out of the scaled logits [V]; one token at least stays."""
        if 0 < self.top_k < len(row):
            row[row < np.partition(row, -self.top_k)[-self.top_k]] = -np.inf
        if self.top_p < 1:
            order = np.argsort(row)
            weights = np.exp(row[order] - row[order[-1]])
            below = np.cumsum(weights) <= (1 - self.top_p) * weights.sum()
            below[-1] = False
            row[order[below]] = -np.inf
        if self.min_p:
            row[row < row.max() + np.log(self.min_p)] = -np.inf


AS_THEY_ARE: Final = Sampling()


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which token follows: the likeliest that is allowed, or one drawn by its probability.

    end: of a text. never: tokens that are left out everywhere; first_never: besides as the first of the text. moments:
    the tokens of times, None for a text without. scored: probabilities are wanted. silent: the token whose probability
    behind the prompt's first token is that nobody speaks, -1 without one.
    choices: before the text, one of these ends the prompt; then `forced` follow, and `opening` comes before all.
    temperatures: of the first text and of those that are tried after it, as long as the judge asks for another; 0 takes
    the likeliest token. seed: of the draws. sampling: what changes the probabilities. stops: whether a text ends behind
    its tokens so far. allowed: which tokens may follow those of a text so far [V], None for all; the logits of all
    tokens are needed for that.
    """

    end: tuple[int, ...] = ()
    never: tuple[int, ...] = ()
    first_never: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    scored: bool = False
    silent: int = -1
    moments: Moments | None = None
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    judge: Judge | None = None
    sampling: Sampling = AS_THEY_ARE
    stops: Callable[[Sequence[int]], bool] | None = None
    allowed: Callable[[Sequence[int]], npt.NDArray[np.bool_]] | None = None

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether a text ends behind its tokens so far."""
        return bool(tokens) and (tokens[-1] in self.end or (self.stops is not None and self.stops(tokens)))

    @property
    def before_text(self) -> int:
        """Return how many tokens are put before the text, beside the prompt."""
        return len(self.opening) + len(self.forced) + 1 if self.choices else 0

    def choose(self, logits: npt.NDArray[Any], before: Sequence[int], temperature: float = 0.0) -> tuple[int, float]:
        """Return the token behind those of a text so far and, if it is wanted, the logarithm of its probability.

        logits: [r, V], of which the last row counts. The probability is that among the allowed tokens.
        """
        row = logits[-1]
        left_out = [*self.never, *(() if before else self.first_never)]
        steered = self.moments is not None or self.allowed is not None
        if left_out or steered or self.sampling is not AS_THEY_ARE:
            row = row.copy()
            row[left_out] = -np.inf
            self.sampling.shift(row, before)
            if self.moments is not None:
                self.moments.allow(row, before)
            if self.allowed is not None:
                row[~self.allowed(before)] = -np.inf
        token = int(row.argmax()) if temperature == 0 else self._draw(row, len(before), temperature)
        return token, _log_probability(row, token) if self.scored else 0.0

    def choose_prompt(self, logits: npt.NDArray[Any]) -> int:
        """Return the likeliest of the choices that end the prompt."""
        return self.choices[int(logits[-1][list(self.choices)].argmax())]

    def _draw(self, row: npt.NDArray[Any], place: int, temperature: float) -> int:
        """Return a token drawn by seed, temperature and place, whatever else was drawn."""
        scaled = row.astype(np.float64) / temperature
        self.sampling.narrow(scaled)
        sums = np.cumsum(np.exp(scaled - scaled.max()))
        draws = np.random.Generator(np.random.Philox(key=[self.seed, round(temperature * 1000)], counter=place))
        return int(np.searchsorted(sums, draws.random() * sums[-1], "right"))

    def silence(self, logits: npt.NDArray[Any]) -> float | None:
        """Return the probability that nobody speaks by the logits [r, V] of the first run, None if it is not wanted."""
        return None if self.silent < 0 else float(np.exp(_log_probability(logits[0], self.silent)))


LIKELIEST: Final = TokenRules()


def _log_probability(row: npt.NDArray[Any], token: int) -> float:
    wide = row.astype(np.float64)
    top = wide.max()
    return float(wide[token] - top - np.log(np.exp(wide - top).sum()))


def speech_rules(config: JsonConfig, extras: Mapping[str, Any]) -> JsonConfig:
    """Return the file that says which tokens of speech are left out; raises UnsupportedModelError for what else would
    change the likeliest text."""
    rules = JsonConfig(FILE, extras[FILE]) if FILE in extras else config
    rules.check_keys(_SPEECH_KEYS)
    return rules


def end_tokens(config: JsonConfig, extras: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """Return the tokens after which a text ends, none if no file names one.

    generation_config.json counts where it is there, else config.json. Raises UnsupportedModelError for what would
    change the most likely text, ModelError for end tokens that are no tokens.
    """
    if FILE in extras:
        config = JsonConfig(FILE, extras[FILE])
        config.check_keys(_KEYS)
    else:
        config.check_keys(_OLD_KEYS)
    named = config.get("eos_token_id", [])
    found = named if isinstance(named, list) else [named]
    if not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < vocab for v in found):
        raise config.bad_value("eos_token_id", f"a token from 0 to {vocab - 1}, or a list of them", named)
    return tuple(sorted(set(found)))
