"""Writes seeded random models (`hepti model make`): JSON files, weights, and small valid tokenizers."""

from __future__ import annotations

import json
import math
import os
import string
import zlib
from collections.abc import Mapping
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from hepti_mqtt.core.errors import ConfigError, ModelError
from hepti_mqtt.core.ids import PART_MARK
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.models import (
    FAMILIES,
    Kind,
    models_of,
    spec_from_config,
    tensor_sources,
    tokenizer_class,
    towers_of,
    views,
)
from hepti_mqtt.models.kinds import kinds_of
from hepti_mqtt.models.shapes import TextInput
from hepti_mqtt.models.speech import SpeechInput, last_tokens
from hepti_mqtt.models.transformer import ModelSpec

# The special tokens stand first, in the order in which the families' configs number them.
_BERT: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROBERTA: Final = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_WORDS: Final = (
    "the of and to in is was for on as with by that it at from his an were are which this be had or has first one "
    "their its new after but who not they have device broker planner sensor room light door window warm cold on off "
    "temperature machine camera letter answer question good bad"
)


# Chat template of models that read pictures, in the form of Idefics 3.
_SEEING: Final = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %} ; {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def _marks(config: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the tokens that stand for pictures in texts; the first one stands for a row of a picture."""
    if not towers_of(config).sees:
        return {}
    words, eyes = models_of(config).values()
    return {mark: words["image_token_id"] + i for i, mark in enumerate(views(eyes, extras).marks)}


def write_tokenizer(path: Path, vocab: int, roberta: bool = False, marks: Mapping[str, int] | None = None) -> None:
    """Write tokenizer.json with exactly `vocab` tokens (at least 120): WordPiece, lower case, sequence markers.

    marks: further special tokens by their ids; those beyond `vocab` are left out.
    """
    special = _ROBERTA if roberta else _BERT
    letters = string.ascii_lowercase + string.digits
    words = chain(
        special,
        letters,
        (f"##{letter}" for letter in letters),
        ".,!?'-:;()",
        dict.fromkeys(word for word in _WORDS.split() if len(word) > 1),
        (f"word{i}" for i in count()),
    )
    tokens = [next(words) for _ in range(vocab)]
    placed = {mark: i for mark, i in (marks or {}).items() if i < vocab}
    for mark, i in placed.items():
        tokens[i] = mark
    ids = {token: i for i, token in enumerate(tokens)}
    start, end = (special[0], special[2]) if roberta else (special[2], special[3])
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=special[3] if roberta else special[1]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} {end} $B {end}" if roberta else f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(start, ids[start]), (end, ids[end])],
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*special, *placed)])
    tokenizer.save(str(path))


def write_speech_tokenizer(path: Path, vocab: int, rows: int) -> None:
    """Write tokenizer.json with exactly `vocab` tokens: words, then control tokens of speech."""
    special = last_tokens(vocab, rows)
    words = chain(dict.fromkeys(word for word in _WORDS.split()), (f"word{i}" for i in count()))
    tokens = [*islice(words, vocab - len(special)), *special]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(path))


def _tokenizer_options(model_type: str, roberta: bool) -> dict[str, Any]:
    """Return tokenizer_config.json: of BERT's class if it is the model's own, else of a class that adds nothing."""
    own = tokenizer_class(model_type) == "BertTokenizer"
    start, pad, end, unknown, mask = _ROBERTA if roberta else (_BERT[i] for i in (2, 0, 3, 1, 4))
    return {
        "tokenizer_class": "BertTokenizer" if own else "PreTrainedTokenizerFast",
        **({"do_lower_case": True} if own else {}),
        **{"cls_token": start, "pad_token": pad, "sep_token": end, "unk_token": unknown, "mask_token": mask},
    }


# ----------------------------------------------------------------------------------------------------------------------
# Writing seeded random models: the files of a real checkpoint, with the shapes of a kind.
#
# Weights depend on seed and stored name only: Generator(PCG64(SeedSequence([seed, crc32(stored name)]))), float32
# standard normals in chunks, times the kind's spread (standard deviation), plus 1 for the weights of norms. So a model
# of fewer layers has the first layers of the whole one, and a test can write a model again from its seed. For a kind
# without a spread it is that of He et al., 2015, for matrices, and 0.1 for vectors. Variances are 1 plus the normals'
# absolute values.


_CHUNK: Final = 1 << 20
_MAX_LAYERS: Final = 1000


KINDS: Final[Mapping[str, Kind]] = {name: kind for family in FAMILIES for name, kind in kinds_of(family).items()}


def make_model(kind: str, out: str | Path, seed: int = 0, layers: int | None = None) -> Path:
    """Write a seeded random Hugging Face directory with the shapes of `kind` to `out`; return its path.

    layers: in place of the kind's number. It needs a few megabytes of memory for any size of model. Raises ConfigError
    for an unknown kind, a directory that is not empty, or a number out of range; ModelError if it cannot be written.
    """
    if seed < 0:
        raise ConfigError(f"seed {seed} is negative; use one >= 0")
    if layers is not None and not 1 <= layers <= _MAX_LAYERS:
        raise ConfigError(f"layers {layers} is not within 1 to {_MAX_LAYERS}")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory; choose another path or remove it first")
    files, specs, spread = _files(kind, layers)
    config = files["config.json"]
    try:
        for name, data in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        for spec in specs.values():
            _write_words(out, spec, config, files)
        towers = towers_of(config)
        compared = towers.matching
        numbers = {} if compared is None else {n: compared.shape for n in (compared.scale, compared.bias) if n}
        inits = _tensor_inits(specs, towers.renamed, numbers, spread)
        _write_weights(out / "model.safetensors", inits, seed)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error}; choose a place with room and permission") from error
    return out


def _write_words(out: Path, spec: Spec, config: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Write the tokenizer of a model that reads or writes text, and a chat template if it reads pictures."""
    reads = spec.input_spec
    if isinstance(reads, TextInput):
        roberta = isinstance(spec, ModelSpec) and spec.text is not None and spec.text.position_offset > 0
        write_tokenizer(out / "tokenizer.json", reads.vocab, roberta, _marks(config, files))
        options = _tokenizer_options(str(config.get("model_type")), roberta)
        if towers_of(config).sees:
            eyes = [*models_of(config).values()][1]
            options["chat_template"] = _SEEING.replace("<image>", views(eyes, files).mark)
        (out / "tokenizer_config.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    if isinstance(reads, SpeechInput):
        write_speech_tokenizer(out / "tokenizer.json", reads.vocab, reads.longest)


def spec_of_kind(kind: str, layers: int | None = None) -> Spec:
    """Return the spec of the model that `make_model` would write: of several the first, or MODEL for KIND.MODEL.

    Raises ConfigError for an unknown kind.
    """
    whole, _, part = kind.rpartition(PART_MARK) if kind not in KINDS and is_kind(kind) else (kind, "", "")
    specs = _files(whole, layers)[1]
    return specs[part] if part else next(iter(specs.values()))


def is_kind(name: str) -> bool:
    """Return whether a name is a kind, or KIND.MODEL of a kind with several models."""
    whole, _, part = name.rpartition(PART_MARK)
    return name in KINDS or (whole in KINDS and part in models_of(KINDS[whole].config))


def _files(kind: str, layers: int | None) -> tuple[dict[str, Any], dict[str, Spec], float | None]:
    """Return a kind's JSON files by path, the specs of its models by name, and the spread of its weights or None."""
    if kind not in KINDS:
        raise ConfigError(f"model kind {kind!r} is unknown; kinds: {', '.join(KINDS)}")
    described = KINDS[kind]
    if layers is not None and described.depth not in described.config:
        raise ConfigError(f"the number of layers of {kind} cannot be changed; leave --layers out")
    config = dict(described.config) if layers is None else {**described.config, described.depth: layers}
    specs = {name: spec_from_config(one, described.extras) for name, one in models_of(config).items()}
    return {"config.json": config, **described.extras}, specs, config.get("initializer_range")


class _TensorInit(NamedTuple):
    """A tensor to write."""

    shape: tuple[int, ...]
    #: Standard deviation of its values.
    spread: float
    #: Add 1 to its values.
    one: bool = False
    #: Take absolute values, before 1 is added.
    positive: bool = False


def _tensor_inits(
    specs: Mapping[str, Spec],
    names: Mapping[str, Mapping[str, str]],
    numbers: Mapping[str, tuple[int, ...]],
    spread: float | None,
) -> dict[str, _TensorInit]:
    """Return the tensors to write, by stored name; tied tensors have the same name.

    names: by model, its own prefixes of tensors by the checkpoint's. numbers: shapes of further tensors by name.
    """
    inits = {name: _TensorInit(shape, 0.1, one=True) for name, shape in numbers.items()}
    for model, spec in specs.items():
        prefixes = {family: stored for stored, family in reversed([*names.get(model, {}).items()])}
        for name, tensor in _inits_of(spec, spread).items():
            first = next((first for first in prefixes if name.startswith(first)), "")
            inits.setdefault(prefixes.get(first, "") + name.removeprefix(first), tensor)
    return inits


def _inits_of(spec: Spec, spread: float | None) -> dict[str, _TensorInit]:
    inits = dict[str, _TensorInit]()
    for source in (source for source in tensor_sources(spec) if source.stored):
        shape = source.stored_shape
        he = math.sqrt(2 / math.prod(shape[1:])) if len(source.shape) > 1 else 0.1
        own = _TensorInit(shape, he if spread is None else spread, one=source.name.endswith("norm.weight"))
        inits.setdefault(source.primary_name, own)
        for name, part in source.folded_shapes().items():
            positive = source.norm is not None and name == source.norm.variance
            one = positive or name in source.factor or (source.norm is not None and name == source.norm.weight)
            one = one or (source.projected is not None and name in source.projected.gamma)
            inits.setdefault(name, _TensorInit(part, 1.0 if positive else 0.1, one, positive))
    return inits


def _write_weights(path: Path, stored: Mapping[str, _TensorInit], seed: int) -> None:
    """Write model.safetensors, tensor by tensor, under another name until it is complete."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in stored.items():
        nbytes = 4 * math.prod(tensor.shape)
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in stored.items():
            _write_tensor(file, name, tensor, seed)
    os.replace(partial, path)


def _write_tensor(file: BinaryIO, name: str, tensor: _TensorInit, seed: int) -> None:
    stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])))
    count = math.prod(tensor.shape)
    for start in range(0, count, _CHUNK):
        chunk = stream.standard_normal(min(_CHUNK, count - start), dtype=np.float32)
        if tensor.positive:
            np.abs(chunk, out=chunk)
        chunk *= np.float32(tensor.spread)
        if tensor.one:
            chunk += np.float32(1)
        file.write(chunk.astype("<f4", copy=False).data)
