"""Writes tests/golden/questions.json: what transformers and sentence-transformers answer to `question_cases`.

`python tests/helpers/make_question_answers.py` needs torch, transformers >= 5 and sentence-transformers >= 5.4. The
answers of extractive question answering, whose pipeline version 5 has no more, are found among all spans of its logits.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}

import numpy as np
import torch
import transformers
from question_cases import ANSWERS, CASES
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.util import normalize_embeddings, truncate_embeddings

transformers.logging.set_verbosity(50)
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)


def main() -> None:
    answers = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as root:
            answers[case.name] = answers_of(str(case.write(Path(root) / "model")), case)
        print(case.name, json.dumps(answers[case.name])[:150], flush=True)
    lines = (f"{json.dumps(name)}: {json.dumps(answers[name])}" for name in answers)
    ANSWERS.write_text("{" + ",\n".join(lines) + "}\n")


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
    model = SentenceTransformer(path)
    embeddings = model.encode(request.get("texts", [request.get("text")]), prompt_name=request.get("prompt"))
    if (size := request.get("dimensions")) is not None:
        cut = truncate_embeddings(torch.from_numpy(embeddings), size)
        embeddings = (normalize_embeddings(cut) if len(model) == 3 else cut).numpy()
    return np.asarray(embeddings).tolist()


def similarity(path, request):
    model = SentenceTransformer(path)
    query, documents = model.encode_query(request["query"]), model.encode_document(request["documents"])
    return model.similarity(query, documents)[0].tolist()


if __name__ == "__main__":
    sys.exit(main())
