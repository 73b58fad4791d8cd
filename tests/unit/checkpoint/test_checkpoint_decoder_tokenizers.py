"""Tokenizers of decoders that embed: the template of tokenizer.json puts the end token that is read behind a text."""

import json

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hepti_mqtt.checkpoint.tokenizer import open_tokenizer
from hepti_mqtt.checkpoint.tokenizer_classes import CLASSES
from hepti_mqtt.core.errors import UnsupportedModelError


def opened(path, made, ends, options):
    """Return how transformers 5 reads a tokenizer; ends: the tokens before and behind a text."""
    made.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in ends if end])
    single = " ".join([*([ends[0]] if ends[0] else []), "$A", ends[1]])
    special = [(end, made.token_to_id(end)) for end in ends if end]
    made.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=special)
    made.save(str(path / "tokenizer.json"))
    files = {"tokenizer_config.json": {"add_bos_token": False, **options}}
    return open_tokenizer(path, {}, json.loads(json.dumps(files)), masks=False, lower=False, generates=False).tokenizer


def qwen2(words=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, "Th", "The"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("T", "h"), ("Th", "e")]))
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    pattern = CLASSES["Qwen2Tokenizer"].pre_tokenizer(_options(), None)["pretokenizers"][0]["pattern"]["Regex"]
    split = pre_tokenizers.Split(Regex(words or pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return made


def _options():
    from hepti_mqtt.models.config import JsonConfig

    return JsonConfig("tokenizer_config.json", {})


def gemma():
    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, **{f"<0x{i:02X}>": 4 + i for i in range(256)}}
    vocab |= {piece: 260 + i for i, piece in enumerate(("\u2581", "T", "h", "e", "Th", "The"))}
    made = Tokenizer(models.BPE(vocab, [("T", "h"), ("Th", "e")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return made


def test_qwen2(tmp_path):
    options = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "unk_token": None}
    tokenizer = opened(tmp_path, qwen2(), ("", "<|endoftext|>"), options)
    end = tokenizer.token_to_id("<|endoftext|>")
    assert tokenizer.encode("The The").ids == [257, tokenizer.token_to_id("\u0120"), 257, end]
    assert end not in tokenizer.encode("The<|endoftext|>").ids[:-1]  # a text cannot end itself
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def siglip(*steps):
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581the", "\u2581bike", "s", "T", "!", "b", "e"]
    made = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=2))
    made.normalizer = normalizers.Sequence(list(steps)) if steps else None
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return made


@pytest.mark.parametrize("steps", [(), (normalizers.Lowercase(), normalizers.Replace("!", ""), normalizers.Strip())])
def test_siglip_drops_case_and_punctuation(tmp_path, steps):
    options = {"tokenizer_class": "SiglipTokenizer"}
    tokenizer = opened(tmp_path, siglip(*steps), ("", "</s>"), options)
    assert tokenizer.encode(" The  BIKE'S! ").ids == [4, 5, 6, 1]
    assert tokenizer.encode("... !").ids == [1]
    if not steps:
        cased = opened(tmp_path, siglip(), ("", "</s>"), {**options, "do_lower_case": False})
        assert cased.encode("T!").ids == [3, 7, 1]


def test_siglip_prepares_texts_in_no_other_way(tmp_path):
    with pytest.raises(UnsupportedModelError):
        opened(tmp_path, siglip(normalizers.NFD()), ("", "</s>"), {"tokenizer_class": "SiglipTokenizer"})


@pytest.mark.parametrize("lowers", [False, True])
def test_siglip_2_lowers_the_case_before_gemmas_steps(tmp_path, lowers):
    made = gemma()
    if lowers:
        made.normalizer = normalizers.Sequence([normalizers.Lowercase(), made.normalizer])
    tokenizer = opened(tmp_path, made, ("<bos>", "<eos>"), {"tokenizer_class": "Siglip2Tokenizer"})
    assert tokenizer.encode("THe").ids == [2, 4 + ord("t"), 262, 263, 1]


def test_other_words_than_those_of_the_class_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError):
        opened(tmp_path, qwen2("."), ("", "<|endoftext|>"), {"tokenizer_class": "Qwen2Tokenizer"})


@pytest.mark.parametrize("whole", [True, False], ids=["tokenizer.json", "vocab.json"])
def test_clip(tmp_path, whole):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "th", "the</w>"]
    ends = ("<|startoftext|>", "<|endoftext|>")
    vocab = {piece: i for i, piece in enumerate([*words, *ends])}
    merges = [("t", "h"), ("th", "e</w>")]
    if whole:
        made = Tokenizer(models.BPE(vocab=vocab, merges=merges, end_of_word_suffix="</w>", unk_token=ends[1]))
        steps = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        made.normalizer = normalizers.Sequence(steps)
        split = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"  # as older files have it
        kept = pre_tokenizers.Split(Regex(split), "removed", invert=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([kept, pre_tokenizers.ByteLevel(False)])
        tokenizer = opened(tmp_path, made, ends, {"tokenizer_class": "CLIPTokenizer"})
    else:
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)))
        options = {"model_type": "clip_text_model"}
        tokenizer = open_tokenizer(tmp_path, options, {}, masks=False, lower=False, generates=False).tokenizer
    start, end = vocab[ends[0]], vocab[ends[1]]
    assert tokenizer.encode(" The\n THE the4").ids == [start, *[vocab["the</w>"]] * 3, vocab["4</w>"], end]
    assert end not in tokenizer.encode("a <|endoftext|> b").ids[:-1]


@pytest.mark.parametrize(("more", "same"), [([], True), ([("1", "2")], False), ([("\u0120", "1")], False)])
def test_a_tokenizer_that_splits_differently_counts_if_its_ids_are_the_same(tmp_path, more, same):
    """SmolLM2's directory names GPT-2's class, and its tokenizer.json takes digits one by one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, "Th", *("".join(pair) for pair in more)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("T", "h"), *more]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    files = {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}}
    how = {"masks": False, "lower": False, "generates": True}
    if not same:
        with pytest.raises(UnsupportedModelError):
            open_tokenizer(tmp_path, {}, files, **how)
        return
    tokenizer = open_tokenizer(tmp_path, {}, files, **how).tokenizer
    assert tokenizer.encode("Th 12").tokens == ["Th", "\u0120", "1", "2"]
