"""Requests beyond one text, and the directories that they are for: shared by the script that asks the reference and the
test that compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from hepti_mqtt.checkpoint import make_model

ANSWERS = Path(__file__).resolve().parent.parent / "golden" / "questions.json"

LONG = " ".join(f"the {word} light is warm {i}," for i, word in enumerate(("cold", "door", "room") * 3))
PAIRS = [["the sensor is cold", "a warm room"], ["door?", "the camera, window 42"], ["the room", LONG]]
DOCUMENTS = ["the door is cold", "a warm light in the room", "camera", "the planner has a broker and a device"]
CONTEXT = " ".join(f"The {word} in room {i} is of device {i * 7}." for i, word in enumerate(("door", "lamp", "fan")))
PROMPTS = {"query": "question: ", "document": "answer: ", "": "", "q": "the room "}
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"


class Case(NamedTuple):
    """A request to a seeded model; change: of its files."""

    name: str
    kind: str
    request: dict[str, Any]
    change: Callable[[Path], None] = lambda path: None

    def write(self, path: Path) -> Path:
        """Write the directory of the case to `path`."""
        make_model(self.kind, path, seed=3)
        self.change(path)
        return path


def put(file: str, **values: Any) -> Callable[[Path], None]:
    """Return a change that sets keys of a file."""

    def change(path: Path) -> None:
        data = json.loads((path / file).read_text()) if (path / file).is_file() else {}
        (path / file).write_text(json.dumps({**data, **values}))

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a change that makes several."""

    def change(path: Path) -> None:
        for one in changes:
            one(path)

    return change


def labels(*names: str) -> Callable[[Path], None]:
    """Return a change that names the outputs."""
    return put("config.json", id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})


def dense(*layers: tuple[int, int, bool, str]) -> Callable[[Path], None]:
    """Return a change that puts dense layers behind the pooling: inputs, outputs, bias, activation."""

    def change(path: Path) -> None:
        modules = json.loads((path / MODULES).read_text())
        for i, (inputs, outputs, bias, activation) in enumerate(layers):
            folder = f"{2 + i}_Dense"
            (path / folder).mkdir()
            config = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
            (path / folder / "config.json").write_text(json.dumps(config))
            rng = np.random.default_rng(i)
            weights = {"linear.weight": rng.normal(0, 0.3, (outputs, inputs)), "linear.bias": rng.normal(0, 1, outputs)}
            kept = {name: value.astype(np.float32) for name, value in weights.items() if bias or "bias" not in name}
            save_file(kept, path / folder / "model.safetensors")
            modules.insert(2 + i, {"idx": 2 + i, "name": folder, "path": folder, "type": f"{ST}Dense"})
        (path / MODULES).write_text(json.dumps(modules))

    return change


ST = "sentence_transformers.models."


def unnormalized(path: Path) -> None:
    """Take the last module away."""
    modules = json.loads((path / MODULES).read_text())
    (path / MODULES).write_text(json.dumps(modules[:-1]))


def sentences(path: Path) -> None:
    """Write a sentence-transformers directory as the newest version does."""
    modules = json.loads((path / MODULES).read_text())
    for module in modules:
        module["type"] = ST + module["type"].rpartition(".")[2]
    (path / MODULES).write_text(json.dumps(modules))
    put(SETTINGS, __version__={"sentence_transformers": "6.2.0"})(path)


def cross_encoder(path: Path) -> None:
    """Write the files of a cross-encoder as the newest version does."""
    (path / MODULES).write_text(
        json.dumps(
            [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]
        )
    )
    own = {"model_type": "CrossEncoder", "__version__": {"sentence_transformers": "6.2.0"}, "prompts": {}}
    put(SETTINGS, **own, default_prompt_name=None, activation_fn=IDENTITY)(path)
    forward = {"text": {"method": "forward", "method_output_name": "logits"}}
    task = {"transformer_task": "sequence-classification", "modality_config": forward, "module_output_name": "scores"}
    put("sentence_bert_config.json", **task)(path)


def pooling(mode: str) -> Callable[[Path], None]:
    """Return a change of the pooling, as old files have it."""
    return both(sentences, put("1_Pooling/config.json", pooling_mode_mean_tokens=False, **{mode: True}))


TYPED = put("tokenizer_config.json", model_input_names=["input_ids", "token_type_ids", "attention_mask"])
NLI = labels("contradiction", "entailment", "neutral", "x", "y")
TAGS = labels("O", "B-ROOM", "I-ROOM", "B-LAMP", "I-LAMP")
RANK = {"query": "a warm room", "documents": DOCUMENTS}
MINI, NLI_KIND, RANKER = "tiny-minilm", "tiny-bert-classifier", "tiny-bert-ranker"
TEXTS = {"texts": ["the door is cold", LONG], "truncate": True}

CASES = (
    Case("pairs: bert", "tiny-bert-classifier", {"pairs": PAIRS, "truncate": True, "top_k": 5}),
    Case("pairs: one", "tiny-bert-classifier", {"text": "a door", "text_pair": "is warm", "top_k": 5}),
    Case("pairs: electra", "tiny-electra-classifier", {"pairs": PAIRS, "truncate": True}),
    Case("pairs: distilbert", "tiny-distilbert-classifier", {"pairs": PAIRS, "truncate": True}),
    Case("pairs: roberta", "tiny-roberta-classifier", {"pairs": PAIRS, "truncate": True}),
    Case("pairs: albert", "tiny-albert-classifier", {"pairs": PAIRS, "truncate": True}, TYPED),
    Case("rank: sigmoid", RANKER, {**RANK, "return_documents": True}),
    Case("rank: identity", RANKER, RANK, put("config.json", sentence_transformers={"activation_fn": IDENTITY})),
    Case("rank: old", RANKER, RANK, put(
        "config.json", sentence_transformers={}, sbert_ce_default_activation_function=IDENTITY)),
    Case("rank: nothing said", RANKER, {**RANK, "top_k": 2}, put("config.json", sentence_transformers={})),
    Case("rank: new files", RANKER, {**RANK, "query": LONG, "truncate": True}, cross_encoder),
    Case("entities: simple", "tiny-bert-entities", {"texts": [CONTEXT[:60], "The Door, the lamp 42"]}, TAGS),
    Case("entities: each token", "tiny-electra-entities", {"text": CONTEXT[:60], "aggregation": "none"}, TAGS),
    Case("entities: roberta", "tiny-roberta-entities", {"text": CONTEXT[:60]}, TAGS),
    Case("entities: albert", "tiny-albert-entities", {"text": CONTEXT[:60]}, TAGS),
    Case("entities: distilbert", "tiny-distilbert-entities", {"text": CONTEXT[:60]}, TAGS),
    *(
        Case(f"answers: {family}", f"tiny-{family}-answers", {"question": "the lamp?", "context": CONTEXT[:60]}, change)
        for family, change in (
            ("bert", put("config.json")), ("roberta", put("config.json")), ("distilbert", put("config.json")),
            ("electra", put("config.json")), ("albert", TYPED),
        )
    ),
    Case("labels: one", NLI_KIND, {"text": "warm door", "candidate_labels": ["door", "a lamp", "cold"]}, NLI),
    Case("labels: several", NLI_KIND, {
        "texts": ["warm door", "the room"], "candidate_labels": ["door", "lamp"], "multi_label": True,
        "hypothesis_template": "It is about {}!"}, NLI),
    Case("labels: cut", NLI_KIND, {"text": LONG, "candidate_labels": ["door", "lamp"], "truncate": True}, NLI),
    Case("vectors: dense", MINI, TEXTS, both(sentences, dense((32, 24, True, TANH)))),
    Case("vectors: dense twice", MINI, TEXTS, both(
        sentences, dense((32, 40, False, IDENTITY), (40, 16, False, IDENTITY)))),
    Case("vectors: dense, not normalized", MINI, TEXTS, both(sentences, unnormalized, dense(
        (32, 24, True, "torch.nn.modules.activation.ReLU"), (24, 24, True, "torch.nn.modules.activation.GELU")))),
    *(
        Case(f"vectors: {mode}", MINI, TEXTS, both(pooling(f"pooling_mode_{mode}"), unnormalized))
        for mode in ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    ),
    Case("vectors: last, by name", MINI, TEXTS, both(
        sentences, put("1_Pooling/config.json", pooling_mode="lasttoken"))),
    Case("vectors: a prompt", MINI, {"text": "warm door", "prompt": "q"}, both(
        sentences, put(SETTINGS, prompts=PROMPTS))),
    Case("vectors: dimensions", MINI, {**TEXTS, "dimensions": 8}, sentences),
    Case("vectors: dimensions of plain ones", MINI, {**TEXTS, "dimensions": 8}, both(sentences, unnormalized)),
    *(
        Case(f"similarity: {name}", MINI, RANK, both(
            sentences, unnormalized, put(SETTINGS, prompts=PROMPTS, similarity_fn_name=name, default_prompt_name="q")))
        for name in ("cosine", "dot", "euclidean", "manhattan")
    ),
)  # fmt: skip
