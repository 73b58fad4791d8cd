"""The choice of a generated text's next token: rules, candidates and draws; their defaults in a model's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.spec import CANDIDATES, Draw
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
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "watermarking_config": ({},),
}
# Keys of other kinds of sampling, of several texts, of lengths (which requests set), of further outputs, of speed.
_WITHOUT_EFFECT: Final = frozenset({
    "_from_model_config", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_ensemble_weight", "assistant_lookbehind",
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "early_stopping", "epsilon_cutoff", "eta_cutoff",
    "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_length", "max_matching_ngram_size",
    "max_new_tokens", "max_time", "monitor_progress", "name_or_path", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "remove_invalid_values", "renormalize_logits", "return_dict_in_generate", "speculation_type", "target_lookbehind",
    "top_h", "transformers_version", "typical_p", "use_cache", "use_mtp",
})  # fmt: skip
# Least and largest value in generation_config.json, as in requests.
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.1, 10.0),
}  # fmt: skip
_KEYS: Final = KeyTable(frozenset({"eos_token_id", "do_sample", "top_k", *_RANGES}), _WITHOUT_EFFECT, _NEUTRAL)
# Further keys if `do_sample` is true.
_DRAWN: Final = KeyTable(
    frozenset(),
    only={"typical_p": (1, 1.0), "epsilon_cutoff": (0, 0.0), "eta_cutoff": (0, 0.0), "top_h": ()},
    closed=False,
)
_ONCE: Final[Mapping[str, tuple[Any, ...]]] = {**_NEUTRAL, "repetition_penalty": (1, 1.0)}
_STEERING: Final = {"begin_suppress_tokens", "forced_decoder_ids", "suppress_tokens"}  # supported for speech
_SPEECH_KEYS: Final = KeyTable(
    frozenset(), only={key: values for key, values in _ONCE.items() if key not in _STEERING}, closed=False
)
_OLD_KEYS: Final = KeyTable(frozenset(), only=_ONCE, closed=False)  # in config.json, without generation_config.json


class Verdict(NamedTuple):
    """The judgement of a transcribed text."""

    #: Write the text again, with the next temperature.
    again: bool
    #: Quality of this attempt; the attempt with the largest is the answer.
    worth: tuple[float, ...]


Judge = Callable[[Sequence[int], Sequence[float], float], Verdict]  # tokens, their scores, the probability of silence


class Likely(NamedTuple):
    """A token, and the logarithm of its probability by the model, without the request's changes."""

    token: int
    logprob: float


class Candidates(NamedTuple):
    """The likeliest next tokens of a row, best first, equal ones by id; no other token has a larger logit."""

    #: Tokens [k].
    ids: npt.NDArray[np.intp]
    #: Their logits [k].
    values: npt.NDArray[np.float32]
    #: Number of all tokens.
    vocab: int
    #: Sums over all tokens of exp(x - largest), and of exp((x - largest) / temperature); x: logits.
    sums: tuple[float, float]
    temperature: float

    @classmethod
    def read(cls, row: npt.NDArray[np.float32], vocab: int) -> Candidates:
        """Return the candidates in a row of a run's answer, as the kernel `candidates` writes it."""
        k = (len(row) - 3) // 2
        return cls(row[k : 2 * k].astype(np.intp), row[:k], vocab, (float(row[-3]), float(row[-2])), float(row[-1]))

    @classmethod
    def of(cls, logits: npt.NDArray[np.float32], count: int) -> Candidates:
        """Return the candidates of a row of all logits, without sums."""
        best = np.argsort(-logits, kind="stable")[:count]
        return cls(best, logits[best], len(logits), (0.0, 0.0), 0.0)

    @property
    def is_whole(self) -> bool:
        """Return whether all tokens are candidates."""
        return len(self.ids) == self.vocab

    def likely(self, place: int, count: int) -> tuple[Likely, ...]:
        """Return the candidate at `place`, then the first `count`, with their probabilities."""
        whole = float(self.values[0]) + float(np.log(self.sums[0]))
        return tuple(Likely(int(self.ids[i]), float(self.values[i]) - whole) for i in (place, *range(count)))


class _Ranked(NamedTuple):
    """Candidates by their changed logits, best first; changes are those of a request (`Sampling`, `TokenRules`)."""

    #: Places in `Candidates` of tokens with changed logits above those of all non-candidates.
    leading: npt.NDArray[np.intp]
    #: Places of the other candidates.
    mixed: npt.NDArray[np.intp]
    #: Changed logits, in the order of `Candidates`.
    values: npt.NDArray[np.float32]
    #: Upper bounds of the changed logits of non-candidates [V]; -inf for candidates.
    bounds: npt.NDArray[np.float32]
    #: The largest of these bounds.
    most: float


class Tail(NamedTuple):
    """Bounds of the tokens outside a list of leading ones; a token's weight is exp((logit - largest) / temperature)."""

    #: Largest logit, divided by the temperature.
    most: float
    #: Least and largest sum of their weights.
    low: float
    high: float


class Kept(NamedTuple):
    """The tokens that may be drawn."""

    #: Number of leading tokens.
    first: int
    #: Largest sum of weights of further tokens, from the tail.
    high: float


NO_TAIL: Final = Tail(-np.inf, 0.0, 0.0)
SLACK: Final = 2e-5  # relative error of sums, which devices compute in f32


@dataclass(frozen=True, slots=True)
class TimeTokens:
    """The tokens for times in transcriptions: one for each step of time; they come in pairs (start, end)."""

    #: First of these tokens, for time 0; all later tokens are times.
    first: int
    #: The token that ends a text; tokens of words are below it.
    end: int
    #: The token that asks for a text without times.
    plain: int
    #: Largest first time, in steps.
    latest: int

    def allow(self, row: npt.NDArray[Any], before: Sequence[int]) -> None:
        """Set the logits [V] of tokens that may not follow to -inf; before: the tokens so far."""
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
        words, times = row[: self.first].max(), row[self.first :]
        top = times.max(initial=-np.inf)
        if np.isfinite(top) and top + np.log(np.exp(times - top, dtype=np.float64).sum()) > words:
            row[: self.first] = -np.inf


@dataclass(frozen=True, slots=True)
class Sampling:
    """Changes of the tokens' probabilities, in this order; the defaults change nothing. Source: transformers."""

    #: For tokens in the prompt and the text: divides positive logits, multiplies negative ones.
    repetition: float = 1.0
    #: Subtracted from the logits of tokens in the text.
    presence: float = 0.0
    #: Subtracted once for each occurrence of the token in the text.
    frequency: float = 0.0
    #: (token, number that is added to its logit).
    bias: tuple[tuple[int, float], ...] = ()
    #: Draw from this number of likeliest tokens; 0: from all.
    top_k: int = 0
    #: Of these, draw from the likeliest tokens that have this probability together.
    top_p: float = 1.0
    #: Of these, draw from tokens with at least this part of the likeliest token's probability.
    min_p: float = 0.0
    #: Tokens of the prompt, for `repetition`.
    prompt: tuple[int, ...] = ()

    def shift(self, row: npt.NDArray[Any], before: Sequence[int]) -> None:
        """Change the logits [V] of the next token; before: the tokens so far."""
        if self.repetition != 1:
            used = np.unique([*self.prompt, *before]).astype(np.intp)
            row[used] = np.where(row[used] < 0, row[used] * self.repetition, row[used] / self.repetition)
        if before and (self.presence or self.frequency):
            used, counts = np.unique(np.asarray(before, np.intp), return_counts=True)
            row[used] -= self.presence + self.frequency * counts
        for token, added in self.bias:
            row[token] += added

    def keep(self, values: npt.NDArray[np.float64], tail: Tail) -> Kept | None:
        """Return the tokens that may be drawn, at least one; None if that depends on the tail.

        values: logits of the leading tokens, divided by the temperature, best first. tail: bounds of all other tokens.
        """
        count, low, high = len(values), tail.low, tail.high
        if self.top_k:
            if self.top_k > count and high > 0:
                return None
            if self.top_k <= count:
                low = high = 0.0
                count = int((values >= values[self.top_k - 1]).sum())
        weights = np.exp(values[:count] - values[0])
        if self.top_p < 1:
            sums = np.append(np.cumsum(weights[::-1])[::-1], 0.0)  # of each weight and all after it, without the tail
            left_out = [sums + t <= (1 - self.top_p) * (sums[0] + t) for t in (low, high)]
            if (left_out[0] != left_out[1]).any():
                return None
            count = max(int((~left_out[0][:-1]).sum()), 1)
            # If `top_p` needs tokens of the tail, one of them reaches it; without this one the sum is below `top_p`.
            high = (
                self.top_p * (sums[0] + high) + np.exp(tail.most - values[0]) - sums[0] if not left_out[1][-1] else 0.0
            )
        if self.min_p:
            least = values[0] + np.log(self.min_p)
            if high > 0 and tail.most >= least:
                return None
            high = 0.0
            count = int((values[:count] >= least).sum())
        return Kept(count, high)


AS_THEY_ARE: Final = Sampling()


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Choice of the next token: the likeliest allowed token, or a token drawn by its probability."""

    #: Tokens that end a text.
    end: tuple[int, ...] = ()
    #: Tokens that never follow.
    never: tuple[int, ...] = ()
    #: Tokens that a text does not begin with.
    first_never: tuple[int, ...] = ()
    #: Tokens that may end the prompt (languages of speech): the likeliest one is chosen; empty: the prompt is complete.
    choices: tuple[int, ...] = ()
    #: Tokens before the prompt, if there are choices.
    opening: tuple[int, ...] = ()
    #: Tokens of the prompt after the choice.
    forced: tuple[int, ...] = ()
    #: Report the probability of each token.
    scored: bool = False
    #: How many of the likeliest tokens to report with each token, besides its own probability; -1: neither.
    likely: int = -1
    #: The token of silence: its probability after the prompt's first token is measured; -1: none.
    silent: int = -1
    #: Tokens of times, None for a text without times.
    times: TimeTokens | None = None
    #: Temperature of each attempt; the judge decides whether there is another attempt. 0 takes the likeliest token.
    temperatures: tuple[float, ...] = (0.0,)
    #: Seed of the draws.
    seed: int = 0
    #: Judges a complete text; None: there is one attempt.
    judge: Judge | None = None
    #: Changes of the probabilities.
    sampling: Sampling = AS_THEY_ARE
    #: Return whether a text ends after its tokens so far, besides `end`.
    stops: Callable[[Sequence[int]], bool] | None = None
    #: Return which tokens [V] may follow the tokens so far; None: all. It needs all logits.
    allowed: Callable[[Sequence[int]], npt.NDArray[np.bool_]] | None = None

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether a text ends after its tokens so far."""
        return bool(tokens) and (tokens[-1] in self.end or (self.stops is not None and self.stops(tokens)))

    @property
    def before_text(self) -> int:
        """Return the number of tokens that the choice, `opening` and `forced` add to the prompt."""
        return len(self.opening) + len(self.forced) + 1 if self.choices else 0

    def choose(self, logits: npt.NDArray[Any], before: Sequence[int], temperature: float = 0.0) -> tuple[int, float]:
        """Return the next token and, if `scored`, the logarithm of its probability among allowed tokens.

        logits: [r, V]; the last row counts. before: the tokens so far.
        """
        raw = row = logits[-1]
        steered = self.times is not None or self.allowed is not None
        if self._changes or steered:
            row = row.copy()
            self._change(row, before)
            if self.times is not None:
                self.times.allow(row, before)
            if self.allowed is not None:
                row[~self.allowed(before)] = -np.inf
        token = int(row.argmax())
        if temperature:
            ids = np.argsort(-row, kind="stable")[: int(np.isfinite(row).sum())]
            first = len(ids)
            if not steered:  # candidates above all others come first
                best = Candidates.of(raw, CANDIDATES)
                leading = best.ids[self._ranked(best, before).leading]
                ids, first = np.concatenate([leading, ids[~np.isin(ids, leading)]]), len(leading)
            drawn = self._draw(ids, row[ids], first, NO_TAIL, len(before), temperature)
            token = token if drawn is None else int(ids[drawn])
        return token, _log_probability(row, token) if self.scored else 0.0

    def likely_with(self, row: npt.NDArray[Any], token: int) -> tuple[Likely, ...]:
        """Return a token, then the `likely` likeliest tokens by all logits [V]; nothing for -1."""
        if self.likely < 0:
            return ()
        best = np.argsort(-row, kind="stable")[: self.likely].tolist()
        return tuple(Likely(one, _log_probability(row, one)) for one in (token, *best))

    @property
    def needs_attempts(self) -> bool:
        """Return whether the prompt has a choice, silence is measured, or the text is judged."""
        return bool(self.choices) or self.silent >= 0 or self.judge is not None

    @property
    def needs_logits(self) -> bool:
        """Return whether every choice of a token needs all logits, not candidates alone."""
        steered = self.times is not None or self.allowed is not None
        return bool(self.choices) or self.scored or self.silent >= 0 or steered or self.judge is not None

    def draw(self, place: int, temperature: float) -> Draw | None:
        """Return the draw of the token at a place of a text; None if the rules need more than candidates."""
        drawn = self.sampling
        changes = drawn != Sampling(top_k=drawn.top_k, top_p=drawn.top_p, min_p=drawn.min_p, prompt=drawn.prompt)
        if changes or self.needs_logits or self.never or self.first_never:
            return None
        return Draw(place, self.seed, temperature, drawn.top_k, drawn.top_p, drawn.min_p)

    def pick(self, row: Candidates, before: Sequence[int], temperature: float = 0.0) -> int | None:
        """Return the place of the candidate that `choose` would return; None if that depends on other tokens."""
        if not temperature and not self._changes:
            return 0
        leading, mixed_in, values, bounds, most = self._ranked(row, before)
        least = row.values[-1]
        if not len(leading):
            return None
        if not temperature:
            return int(leading[0])
        if not np.isclose(row.temperature, temperature, rtol=1e-6):
            return None
        # Bounds of the weights of all other tokens, from the devices' sum over unchanged logits.
        top = float(values[leading[0]])
        with np.errstate(over="ignore", invalid="ignore"):
            before_all = row.sums[1] * np.exp((float(row.values[0]) - top) / temperature)
            others = before_all - _weights(row.values, top, temperature)
            mixed = _weights(values[mixed_in], top, temperature)
            changed = bounds[np.isfinite(bounds) & (bounds > least)]
            lowered = np.count_nonzero(bounds < least) - len(row.ids)
            low = others - SLACK * before_all - lowered * _weights(least[None], top, temperature)
            high = others + SLACK * before_all + _weights(changed, top, temperature)
        if row.is_whole:
            low = high = 0.0
        elif not np.isfinite([low, high]).all():
            return None
        tail = Tail(most / temperature, max(low, 0.0) + mixed, max(high, 0.0) + mixed)
        drawn = self._draw(row.ids[leading], values[leading], len(leading), tail, len(before), temperature)
        return None if drawn is None else int(leading[drawn])

    def _ranked(self, row: Candidates, before: Sequence[int]) -> _Ranked:
        """Return the candidates by their changed logits."""
        bounds = np.full(row.vocab, row.values[-1])
        bounds[row.ids] = row.values
        self._change(bounds, before)
        values = bounds[row.ids]
        bounds[row.ids] = -np.inf
        most = float(bounds.max())
        order = np.lexsort((row.ids, -values))
        count = int((values > most).sum())
        return _Ranked(order[:count], order[count:], values, bounds, most)

    @property
    def _changes(self) -> bool:
        return bool(self.never or self.first_never) or self.sampling is not AS_THEY_ARE

    def _change(self, row: npt.NDArray[Any], before: Sequence[int]) -> None:
        """Change logits [V], or their bounds: suppressed tokens become -inf, then `sampling` applies."""
        row[[*self.never, *(() if before else self.first_never)]] = -np.inf
        self.sampling.shift(row, before)

    def choose_prompt(self, logits: npt.NDArray[Any]) -> int:
        """Return the likeliest of the choices that end the prompt."""
        return self.choices[int(logits[-1][list(self.choices)].argmax())]

    def _draw(
        self,
        ids: npt.NDArray[np.intp],
        values: npt.NDArray[Any],
        first: int,
        tail: Tail,
        place: int,
        temperature: float,
    ) -> int | None:
        """Return the place of the drawn token in ids; None if the draw depends on the tail.

        It depends on seed, temperature and place in the text alone, not on other draws. values: logits of ids: the
        first `first` best first, then other tokens best first. tail: bounds of tokens that are not in ids.
        """
        scaled = values.astype(np.float64) / temperature
        draws = np.random.Generator(np.random.Philox(key=[self.seed, round(temperature * 1000)], counter=place))
        share = draws.random()
        if (kept := self.sampling.keep(scaled, tail)) is None:
            return None
        weights, within = np.exp(scaled[: kept.first] - scaled[0]), draws.random()
        if kept.high <= 0 and kept.first <= first:
            order = np.argsort(ids[: kept.first])
            sums = np.cumsum(weights[order])
            return int(order[np.searchsorted(sums, share * sums[-1], "right")])
        # Draw first between the first tokens and the others, then within them: so the others may be unknown.
        own, rest = np.cumsum(weights[:first]), np.cumsum(weights[first:])
        if len(own) and share * (own[-1] + (rest[-1] if len(rest) else kept.high)) < own[-1]:
            return int(np.searchsorted(own, within * own[-1], "right"))
        return first + int(np.searchsorted(rest, within * rest[-1], "right")) if len(rest) else None

    def silence(self, logits: npt.NDArray[Any]) -> float | None:
        """Return the probability of silence by the logits [r, V] of the first run, None without `silent`."""
        return None if self.silent < 0 else float(np.exp(_log_probability(logits[0], self.silent)))


LIKELIEST: Final = TokenRules()


def drawn_token(draw: Draw, row: npt.NDArray[np.float32], vocab: int) -> int | None:
    """Return the token drawn from the candidates in a row of an answer; None if it depends on other tokens."""
    sampling = Sampling(top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p)
    rules = TokenRules(seed=draw.seed, sampling=AS_THEY_ARE if sampling == AS_THEY_ARE else sampling)
    candidates = Candidates.read(row, vocab)
    chosen = rules.pick(candidates, range(draw.place), draw.temperature)
    return None if chosen is None else int(candidates.ids[chosen])


def _weights(logits: npt.NDArray[Any], top: float, temperature: float) -> float:
    return float(np.exp((logits.astype(np.float64) - top) / temperature).sum())


def _log_probability(row: npt.NDArray[Any], token: int) -> float:
    wide = row.astype(np.float64)
    top = wide.max()
    return float(wide[token] - top - np.log(np.exp(wide - top).sum()))


def sampling_defaults(extras: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the default options of requests in generation_config.json, as transformers reads it.

    Without a temperature, the likeliest token is chosen. Raises ModelError, UnsupportedModelError.
    """
    config = JsonConfig(FILE, extras.get(FILE, {}))
    defaults: dict[str, float] = {}
    if config.flag("do_sample", False):
        config.check_keys(_DRAWN)
        defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    defaults = {key: config.at_least_zero(key, value) for key, value in {**defaults, "repetition_penalty": 1.0}.items()}
    for key in defaults.keys() & _RANGES.keys():
        low, high = _RANGES[key]
        if not low <= defaults[key] <= high:
            raise config.bad_value(key, f"a number from {low:g} to {high:g}", defaults[key])
    neutral = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    return {key: value for key, value in defaults.items() if value != neutral.get(key)}


def speech_rules(config: JsonConfig, extras: Mapping[str, Any]) -> JsonConfig:
    """Return the file with the rules of speech; raises UnsupportedModelError for unsupported keys that change texts."""
    rules = JsonConfig(FILE, extras[FILE]) if FILE in extras else config
    rules.check_keys(_SPEECH_KEYS)
    return rules


def end_tokens(config: JsonConfig, extras: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """Return the tokens after which a text ends, none if no file names one.

    They are in generation_config.json, or without it in config.json. Raises UnsupportedModelError for other keys that
    change the likeliest text, ModelError for end tokens outside the vocabulary.
    """
    if FILE in extras:
        config = JsonConfig(FILE, extras[FILE])
        config.check_keys(_KEYS)
        sampling_defaults(extras)  # raises for wrong defaults now, not at the first request
    else:
        config.check_keys(_OLD_KEYS)
    named = config.get("eos_token_id", [])
    tokens = named if isinstance(named, list) else [named]
    if not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < vocab for v in tokens):
        raise config.bad_value("eos_token_id", f"a token from 0 to {vocab - 1}, or a list of them", named)
    return tuple(sorted(set(tokens)))
