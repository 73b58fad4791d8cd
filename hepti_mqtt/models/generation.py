"""What a model's files say of the text that it generates: where it ends, and what else would change it.

The most likely token follows here, so what only shapes a sampled text has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which token follows: the likeliest that is allowed.

    end: of a text. never: tokens that are left out everywhere; first_never: besides as the first of the text. choices:
    the first token is one of these; forced: those after it; neither is a part of the text. scored: probabilities are
    wanted. silent: the token whose probability behind the prompt's first token is that nobody speaks, -1 without one.
    """

    end: tuple[int, ...] = ()
    never: tuple[int, ...] = ()
    first_never: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    scored: bool = False
    silent: int = -1

    @property
    def before_text(self) -> int:
        """Return how many tokens come before the text."""
        return len(self.forced) + 1 if self.choices else 0

    def choose(self, logits: npt.NDArray[Any], place: int) -> tuple[int, float]:
        """Return the token at a place and, if it is wanted, the logarithm of its probability among the allowed ones.

        logits: [r, V], of which the last row counts.
        """
        text = place - self.before_text
        if -len(self.forced) <= text < 0:
            return self.forced[text], 0.0
        row = logits[-1]
        left_out = [*self.never, *(self.first_never if text == 0 else ())]
        if text < 0:
            allowed = np.full_like(row, -np.inf)
            allowed[list(self.choices)] = row[list(self.choices)]
            row = allowed
        elif left_out:
            row = row.copy()
            row[left_out] = -np.inf
        token = int(row.argmax())
        return token, _log_probability(row, token) if self.scored else 0.0

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
