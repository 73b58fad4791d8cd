"""How the classes of transformers build their tokenizers, which may overrule tokenizer.json.

From transformers 5 on a class builds all parts from tokenizer_config.json. Older versions read most parts from
tokenizer.json. So a stated option counts. Without one, a part of tokenizer.json that differs from its class is refused,
because versions read it differently.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from hepti_mqtt.core.errors import UnsupportedModelError
from hepti_mqtt.models.config import JsonConfig

Part = dict[str, Any] | None  # as tokenizer.json has it

FILE: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"

_BERT_TOKENS: Final = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_ROBERTA_TOKENS: Final = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>", "pad": "<pad>"} | {
    "mask": "<mask>",
}  # fmt: skip
_ALBERT_TOKENS: Final = _BERT_TOKENS | {"bos": "[CLS]", "eos": "[SEP]", "unk": "<unk>", "pad": "<pad>"}
_GPT2_TOKENS: Final = dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>")
_EMPTY: Final = (None, "")
_BPE: Final = {
    "continuing_subword_prefix": _EMPTY, "end_of_word_suffix": _EMPTY, "fuse_unk": (None, False),
    "byte_fallback": (None, False), "ignore_merges": (None, False),
}  # fmt: skip
QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CLIP_OLD_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_CLIP_WORDS: Final = rf"<\|startoftext\|>|<\|endoftext\|>|{_CLIP_OLD_WORDS}"
_CLIP_TOKENS: Final = dict.fromkeys(("unk", "eos", "pad"), "<|endoftext|>") | {"bos": "<|startoftext|>"}
_GEMMA_TOKENS: Final = {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
_MARK: Final = "\u2581"  # replaces a space
_SPACES: Final = {"type": "WhitespaceSplit"}
_SINGLE_SPACES: Final = {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}
_STRIP: Final = {"type": "Strip", "strip_left": True, "strip_right": True}
_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


class TokenizerClass(NamedTuple):
    """A tokenizer class of transformers."""

    #: Type of its model.
    model: str
    #: Special tokens by role.
    tokens: Mapping[str, str]
    #: Allowed values of the model's parameters.
    parameters: Mapping[str, tuple[Any, ...]]
    #: Return the part to use, from the options and the part of tokenizer.json.
    normalizer: Callable[[JsonConfig, Part], Part]
    pre_tokenizer: Callable[[JsonConfig, Part], Part]
    #: Roles of the tokens before and after a text.
    around: tuple[str, str] | None
    #: Put them around texts even if tokenizer.json does not.
    always: bool
    decoder: Part
    #: Vocabulary files that replace a missing tokenizer.json.
    files: tuple[str, ...] = ()
    #: Token types differ between the halves of a pair; None if versions differ.
    typed: bool | None = None
    #: Two separators are between the texts of a pair.
    doubled: bool = False


def differs(part: str, why: str) -> UnsupportedModelError:
    """Return the error for a part of tokenizer.json that its class would build in another way."""
    return UnsupportedModelError(
        f"{FILE}: its {part} is not the one of its class in transformers ({why}), and versions disagree which "
        f'counts; save the tokenizer again, or name "tokenizer_class": "PreTrainedTokenizerFast" in {CONFIG}, if '
        f"{FILE} is to count as it is"
    )


def _option(options: JsonConfig, key: str, default: Any, part: Part, name: str) -> Any:
    """Return a stated option, else the class's default; raise if tokenizer.json has another value."""
    if key in options.data:
        return options.data[key]
    if part is not None and part.get(name) != default:
        raise differs(str(part["type"]), f"{name} is {part.get(name)!r} there, and {CONFIG} has no {key!r}")
    return default


def _bert_normalizer(options: JsonConfig, part: Part) -> Part:
    if part is not None and (part["type"] != "BertNormalizer" or not part["clean_text"]):
        raise differs("normalizer", "a BertNormalizer that cleans texts")
    if part is not None and part["strip_accents"] == part["lowercase"]:
        part = {**part, "strip_accents": None}  # means the same
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": _option(options, "tokenize_chinese_chars", True, part, "handle_chinese_chars"),
        "strip_accents": _option(options, "strip_accents", None, part, "strip_accents"),
        "lowercase": _option(options, "do_lower_case", True, part, "lowercase"),
    }


def _always(part: str, wanted: Part, why: str) -> Callable[[JsonConfig, Part], Part]:
    """Return a rule that accepts only `wanted` or a missing part."""

    def check(_options: JsonConfig, given: Part) -> Part:
        if given not in (None, wanted):
            raise differs(part, why)
        return wanted

    return check


def _bytes(options: JsonConfig, part: Part) -> Part:
    if part is not None and (part["type"] != "ByteLevel" or not part["use_regex"]):
        raise differs("pre_tokenizer", "a ByteLevel that splits by its regular expression")
    prefix = _option(options, "add_prefix_space", False, part, "add_prefix_space")
    return {**_BYTES, "add_prefix_space": prefix}


def _steps(part: Part) -> list[dict[str, Any]]:
    """Return the steps of a normalizer except changes of spaces: the next step splits at spaces."""
    if part is None:
        return []
    steps = part["normalizers"] if part["type"] == "Sequence" else [part]
    spaces = ({"Regex": " {2,}"}, {"Regex": "\\s{2,}"})
    return [s for s in steps if s["type"] != "Strip" and not (s["type"] == "Replace" and s["pattern"] in spaces)]


def _sentencepiece_normalizer(_options: JsonConfig, part: Part) -> Part:
    if [step["type"] for step in _steps(part)] not in ([], ["Precompiled"]):
        raise differs("normalizer", "the one of its sentencepiece model")
    return part


def _canonical_text(options: JsonConfig, part: Part) -> Part:
    """Return SigLIP's preparation of a text: lower case, no punctuation, single spaces, then its sentencepiece model's.

    Its class in transformers does so whatever tokenizer.json says.
    """
    rest = [step for step in _steps(part) if step["type"] == "Precompiled"]
    dropped = ({"type": "Lowercase"}, _SINGLE_SPACES)
    for step in _steps(part):
        if not (step in rest or step in dropped or (step["type"] == "Replace" and step["content"] == "")):
            raise differs("normalizer", "lower case, no punctuation, and the one of its sentencepiece model")
    lower = [{"type": "Lowercase"}] if options.flag("do_lower_case", True) else []
    marks = {"type": "Replace", "pattern": {"Regex": f"[{re.escape(string.punctuation)}]"}, "content": ""}
    return {"type": "Sequence", "normalizers": [*lower, marks, _SINGLE_SPACES, _STRIP, *rest]}


def _albert_normalizer(options: JsonConfig, part: Part) -> Part:
    steps = _steps(part)
    lower = {"type": "Lowercase"} in steps if part is not None else True
    accents = {"type": "StripAccents"} not in steps if part is not None else False
    given = {"type": "ALBERT's normalizer", "lower case": lower, "keeps accents": accents}
    wanted: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": quote}, "content": '"'} for quote in ("``", "''")
    ]
    if not _option(options, "keep_accents", False, given, "keeps accents"):
        wanted += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if _option(options, "do_lower_case", True, given, "lower case"):
        wanted.append({"type": "Lowercase"})
    other_steps = ("Lowercase", "NFKD", "StripAccents")
    if part is not None and [s for s in steps if s["type"] not in other_steps][:2] != wanted[:2]:
        raise differs("normalizer", "two kinds of quotes first")
    rest = [step for step in steps if step["type"] == "Precompiled"]
    if len(rest) != len([s for s in steps if s["type"] not in other_steps]) - 2 * (part is not None):
        raise differs("normalizer", "quotes, accents, case, and the one of its sentencepiece model")
    return {"type": "Sequence", "normalizers": wanted + rest}


def _words(options: JsonConfig, part: Part) -> Part:
    """Return sentencepiece's splitting at spaces; each word begins with a mark."""
    steps = part["pretokenizers"] if part is not None and part["type"] == "Sequence" else [part] if part else []
    mark = steps[-1] if steps else None
    if steps and (steps[:-1] not in ([], [_SPACES]) or (mark or {}).get("type") != "Metaspace"):
        raise differs("pre_tokenizer", "splits at spaces and marks them")
    if mark is not None and (mark["replacement"] != _MARK or not mark["split"]):
        raise differs("pre_tokenizer", f"marks spaces with {_MARK!r}")
    given = {"type": "Metaspace", "prefix": mark["prepend_scheme"] == "always"} if mark is not None else None
    scheme = "always" if _option(options, "add_prefix_space", True, given, "prefix") else "never"
    marked = {"type": "Metaspace", "replacement": _MARK, "prepend_scheme": scheme, "split": True}
    return {"type": "Sequence", "pretokenizers": [_SPACES, marked]}


def _qwen2_words(options: JsonConfig, part: Part) -> Part:
    if options.get("add_prefix_space", False):
        raise differs("pre_tokenizer", "one without a space in front")
    split = {"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
    steps = part["pretokenizers"] if part is not None and part["type"] == "Sequence" else []
    fits = len(steps) == 2 and steps[0] == split and steps[1]["type"] == "ByteLevel" and not steps[1]["use_regex"]
    if part is not None and not (fits and not steps[1]["add_prefix_space"]):
        raise differs("pre_tokenizer", "splits by its regular expression, then into bytes")
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTES, "add_prefix_space": False, "use_regex": False}]}


def _clip_words(_options: JsonConfig, part: Part) -> Part:
    kept: dict[str, Any] = {"type": "Split", "behavior": "Removed", "invert": True}
    now, before = ({**kept, "pattern": {"Regex": words}} for words in (_CLIP_WORDS, _CLIP_OLD_WORDS))
    steps = part["pretokenizers"] if part is not None and part["type"] == "Sequence" else []
    fits = len(steps) == 2 and steps[0] in (now, before) and steps[1]["type"] == "ByteLevel"
    if part is not None and not (fits and not steps[1]["add_prefix_space"] and steps[1]["use_regex"]):
        raise differs("pre_tokenizer", "keeps matches of its regular expression, then splits into bytes")
    return {"type": "Sequence", "pretokenizers": [now, {**_BYTES, "add_prefix_space": False}]}


_LOWER: Final = {"type": "Lowercase"}
_LOWER_NFC: Final = {"type": "Sequence", "normalizers": [{"type": "NFC"}, _SINGLE_SPACES, _LOWER]}
_MARKS: Final = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
_marked_spaces: Final = _always("normalizer", _MARKS, f"marks spaces with {_MARK!r}")


def _lower_marked_spaces(options: JsonConfig, part: Part) -> Part:
    """Return SigLIP 2's normalizer: lower case, which older files lack, then Gemma's."""
    steps = part["normalizers"] if part and part["type"] == "Sequence" else []
    marks = _marked_spaces(options, steps[1] if len(steps) == 2 and steps[0] == _LOWER else part)
    return {"type": "Sequence", "normalizers": [_LOWER, marks]}


def _whole_text(_options: JsonConfig, part: Part) -> Part:
    """Return no splitting: a text has no spaces after they are marked."""
    if part is not None and (part["type"] != "Split" or part["pattern"] != {"String": " "}):
        raise differs("pre_tokenizer", "splits at spaces alone")
    return None


_BERT: Final = TokenizerClass(
    "WordPiece",
    _BERT_TOKENS,
    {"continuing_subword_prefix": (None, "##"), "max_input_chars_per_word": (None, 100)},
    _bert_normalizer,
    _always("pre_tokenizer", {"type": "BertPreTokenizer"}, "a BertPreTokenizer"),
    ("cls", "sep"),
    True,
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    ("vocab.txt",),
    typed=True,
)
_GPT2: Final = TokenizerClass(
    "BPE",
    _GPT2_TOKENS,
    _BPE,
    _always("normalizer", None, "none"),
    _bytes,
    None,
    False,
    _BYTES,
    ("vocab.json", "merges.txt"),
)
_XLM_ROBERTA: Final = TokenizerClass(
    "Unigram",
    _ROBERTA_TOKENS,
    {"unk_id": (3,), "byte_fallback": (None, False)},
    _sentencepiece_normalizer,
    _words,
    ("bos", "eos"),
    True,
    {"type": "Metaspace", "replacement": _MARK, "prepend_scheme": "always", "split": True},
    typed=False,
    doubled=True,
)
_GEMMA: Final = TokenizerClass(
    "BPE",
    _GEMMA_TOKENS,
    {**_BPE, "fuse_unk": (True,), "byte_fallback": (True,)},
    _marked_spaces,
    _whole_text,
    None,
    False,
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    },
)
CLASSES: Final[Mapping[str, TokenizerClass]] = {
    "BertTokenizer": _BERT,
    "DistilBertTokenizer": _BERT._replace(typed=False),
    "ElectraTokenizer": _BERT,
    "MPNetTokenizer": _BERT._replace(tokens=_ROBERTA_TOKENS | {"unk": "[UNK]"}, typed=False, doubled=True),
    "GPT2Tokenizer": _GPT2,
    "Qwen2Tokenizer": _GPT2._replace(
        tokens=dict.fromkeys(("eos", "pad"), "<|endoftext|>"),
        normalizer=_always("normalizer", {"type": "NFC"}, "NFC"),
        pre_tokenizer=_qwen2_words,
    ),
    "CLIPTokenizer": _GPT2._replace(
        tokens=_CLIP_TOKENS,
        parameters={**_BPE, "end_of_word_suffix": ("</w>",)},
        normalizer=_always("normalizer", _LOWER_NFC, "NFC, single spaces, lower case"),
        pre_tokenizer=_clip_words,
        around=("bos", "eos"),
        always=True,
        typed=False,
        doubled=True,
    ),
    "GemmaTokenizer": _GEMMA,
    "Siglip2Tokenizer": _GEMMA._replace(normalizer=_lower_marked_spaces),
    "SiglipTokenizer": _XLM_ROBERTA._replace(
        tokens={"eos": "</s>", "unk": "<unk>", "pad": "</s>"},
        parameters={"byte_fallback": (None, False)},
        normalizer=_canonical_text,
        around=None,
        always=False,
        doubled=False,
    ),
    "RobertaTokenizer": _GPT2._replace(
        tokens=_ROBERTA_TOKENS, around=("cls", "sep"), always=True, typed=False, doubled=True
    ),
    "XLMRobertaTokenizer": _XLM_ROBERTA,
    "CamembertTokenizer": _XLM_ROBERTA,
    "AlbertTokenizer": _XLM_ROBERTA._replace(
        tokens=_ALBERT_TOKENS,
        parameters={"unk_id": (1,), "byte_fallback": (None, False)},
        normalizer=_albert_normalizer,
        around=("cls", "sep"),
        always=False,
        typed=None,
        doubled=False,
    ),
}
# tokenizer.json counts as it is. Of speech, no text becomes ids. DeBERTa was trained with the characters of its
# sentencepiece model, which is what that file has and its class in transformers 5 leaves out.
AS_IT_IS: Final = frozenset({"PreTrainedTokenizer", "TokenizersBackend", "WhisperTokenizer", "DebertaV2Tokenizer"})
