"""Small specs of every family, seeded tensors, and plans with given shares: what the contract tests run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import Program, Send
from hepti_mqtt.core.spec import RequestShape, Spec, TaskHead
from hepti_mqtt.cost.simulator import TopicNames, dispatch_bytes, report_bytes, send_bytes
from hepti_mqtt.models.kinds import kinds_of
from hepti_mqtt.models.shapes import DecoderInput, ImageInput, TextInput, TokenBatch
from hepti_mqtt.models.tensors import EMBEDDING_TABLE, LOGITS_MATRIX
from hepti_mqtt.models.transformer import ImageStem, ModelSpec, TextStem
from hepti_mqtt.planner import Candidate, Decision, Question, price
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import make_plan, programs_digest

MODEL = "m"
TOLERANCE = 5e-5  # max |difference| of hidden states and outputs in f32; the values are of the order of 1 to 10

_TEXT = {"norm_first": False, "max_tokens": 20, "text": TextStem(vocab=50, positions=20, types=2)}
_PICTURE = {"norm_first": True, "max_tokens": 17, "image": ImageStem(16, 4, 3, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))}
_LABELS = {"outputs": 3, "labels": ("a", "b", "c")}


def _small(family: str, architecture: str, layers: int, head: TaskHead, **stem: Any) -> ModelSpec:
    return ModelSpec(family, architecture, layers, 32, 4, 48, head=head, activation="gelu", norm_eps=1e-12, **stem)


_EMBEDDING = TaskHead("embedding", "mean", normalize=True)
_CLASSES = TaskHead("classification", "cls", pooler=True, **_LABELS)
_MASK = TaskHead("masked_token", "mask", outputs=50)
_PICTURE_CLASSES = TaskHead("image_classification", "cls", **_LABELS)

FAMILIES: dict[str, Spec] = {
    "bert-embedding": _small("bert", "BertModel", 3, _EMBEDDING, **_TEXT),
    "bert-classifier": _small("bert", "BertForSequenceClassification", 2, _CLASSES, **_TEXT),
    "bert-mask": _small("bert", "BertForMaskedLM", 2, _MASK, **_TEXT),
    "vit-classifier": _small("vit", "ViTForImageClassification", 3, _PICTURE_CLASSES, **_PICTURE),
}

# The other plain encoders are in by their last seeded tiny kind.
FAMILIES |= {
    kinds[-1]: spec
    for name in models.FAMILIES
    if name not in {spec.family for spec in FAMILIES.values()}
    and (kinds := [kind for kind in kinds_of(name) if kind.startswith("tiny-")])
    and type(spec := spec_of_kind(kinds[-1])) is ModelSpec
    and not isinstance(spec.input_spec, DecoderInput)
}
# Decoders that embed are rows of one family.
FAMILIES |= {kind: spec_of_kind(kind) for kind in ("tiny-qwen3", "tiny-gemma3")}
# Towers that see for a decoder.
FAMILIES |= {kind: spec_of_kind(kind) for kind in ("tiny-smolvlm.image", "tiny-gemma3-eyes.image")}
# Families that only some methods divide.
EVERY_FAMILY = FAMILIES | {kind: spec_of_kind(kind) for kind in ("tiny-debert", "tiny-convnet", "tiny-gpt2")}

_ENCODER = models.graph(FAMILIES["bert-embedding"], TokenBatch((8,)))
METHODS = [(s.name, dict(o)) for s in STRATEGIES.values() if s.why_unsupported(_ENCODER) is None for o in s.options]
METHODS.append(("voltage", {"shares": "uneven", "order": "reordered"}))  # another graph, whatever it costs


def method_id(value: tuple[str, Mapping[str, str]] | str) -> str:
    """Return the name of a method or of a family for the id of a test."""
    return value if isinstance(value, str) else "-".join([value[0], *value[1].values()])


def tensors(spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random canonical tensors of a spec, large enough that every mistake shows."""
    rng = np.random.default_rng(seed)
    arrays = {t.name: (rng.standard_normal(t.shape) * 0.2).astype(np.float32) for t in models.tensor_sources(spec)}
    if (
        EMBEDDING_TABLE in arrays and models.full_ref(spec, EMBEDDING_TABLE).tensor == LOGITS_MATRIX
    ):  # one table for both ends
        arrays[EMBEDDING_TABLE] = (
            arrays[LOGITS_MATRIX]
            if arrays[EMBEDDING_TABLE].shape == arrays[LOGITS_MATRIX].shape
            else arrays[LOGITS_MATRIX].T
        )
    return arrays


def request(spec: Spec, lengths: Sequence[int], want: str = "task", seed: int = 1) -> tuple[TokenBatch, np.ndarray]:
    """Return a shape and random inputs; image models take as many images as there are lengths."""
    reads = spec.input_spec
    if isinstance(reads, DecoderInput):
        shape = TokenBatch((lengths[0],), want, cache=reads.cache(lengths[0]))
        return shape, models.random_inputs(spec, shape, np.random.default_rng(seed))
    shape = reads.batch(len(lengths) if isinstance(reads, ImageInput) else tuple(lengths), want)
    if isinstance(reads, TextInput) and reads.masks:
        rows = tuple(start + length // 2 for start, length in zip(shape.starts, lengths, strict=True))
        shape = replace(shape, mask_rows=rows)
    return shape, models.random_inputs(spec, shape, np.random.default_rng(seed))


def served(spec: Spec, lengths: Sequence[int]) -> Sequence[int]:
    """Return the lengths that one run accepts: it has at most one picture."""
    return lengths[:1] if isinstance(spec.input_spec, ImageInput) else lengths


def plan(spec: Spec, method: tuple[str, Mapping[str, str]], weights: Sequence[float], head: int = 0) -> Plan:
    """Return a plan of devices d0, d1, ... with shares by `weights`."""
    devices = tuple(f"d{i}" for i in range(len(weights)))
    template = Plan(MODEL, PlanVersion(1, 1), method[0], devices, devices[head])
    return make_plan(spec, template, method[0], method[1], weights)


def always(fixed: Plan) -> Callable[[Question], Decision]:
    """Return a decider that always chooses `fixed`, under the plan version of the question."""

    def decider(question: Question) -> Decision:
        chosen = replace(fixed, version=question.plan_version)
        candidate = Candidate(chosen, price(question, chosen, full=True), ())
        return Decision(
            candidate, (candidate,), "pinned by the test", question.cluster, programs_digest(question.spec, chosen)
        )

    return decider


def everyone(method: tuple[str, Mapping[str, str]]) -> Callable[[Question], Decision]:
    """Return a planner that divides the work equally over all devices that are there, and finds that worth it."""

    def decider(question: Question) -> Decision:
        devices = tuple(sorted(question.cluster.devices))
        if not devices:
            raise PlanError("no device is online")
        template = Plan(MODEL, question.plan_version, method[0], devices, devices[0])
        template = replace(template, wire=question.wire, weight_dtype=question.weight_dtype)
        if question.route == "mesh":
            template = replace(template, route="mesh", relayed_pairs=tuple(sorted(question.relayed_pairs)))
        fixed = make_plan(question.spec, template, method[0], method[1], (1.0,) * len(devices))
        decision = always(fixed)(question)
        free = replace(decision.chosen, price=replace(decision.chosen.price, seconds=0.0))
        return replace(decision, chosen=free)

    return decider


def sent_bytes(naming: TopicNames, spec: Spec, shape: RequestShape, programs: dict[str, Program]) -> int:
    """Return all bytes that planner and devices send for one request, without copies by a broker."""
    total = dispatch_bytes(naming, spec, shape, programs)
    for device, program in programs.items():
        total += report_bytes(naming, device)
        for op in program.ops:
            if isinstance(op, Send):
                total += sum(send_bytes(naming, device, op, program.slots[op.slot]))
    return total
