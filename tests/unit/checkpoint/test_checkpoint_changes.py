"""Directories with one change each: the answer of the reference library, or a refusal at the start, never another one.

`tests/helpers/make_checkpoint_answers.py` writes what the reference answers.
"""

import json
from collections import Counter

import checkpoint_changes as changes
import numpy as np
import pytest

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ModelError, RequestError
from hepti_mqtt.models import reference
from hepti_mqtt.runtime.coordinator.texts import Generation
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import read_input

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def golden():
    stored = np.load(changes.ANSWERS)
    where = json.loads(str(stored["where"]))
    arrays = {name: stored[name] for name in stored.files if name != "where"}
    return {name: arrays[str(i)] for name, i in where.items()}


# The other heads of a family read the same files.
QUICK = (
    {"tiny-modernbert-classifier", "tiny-gemma3", "tiny-beit-classifier"}
    | {"tiny-minilm", "tiny-gpt2", "tiny-distilbert-mlm", "tiny-electra", "tiny-vit-classifier", "tiny-hf-resnet"}
    | {f"tiny-{family}-classifier" for family in ("albert", "bert", "roberta", "xlm-roberta")}
)


SAMPLE = 4  # of the changes of a quick kind every so many, another part for each


@pytest.mark.parametrize("kind", [k for k in changes.KINDS if k in QUICK])
def test_a_changed_directory_is_answered_as_by_the_reference_or_refused(kind, golden, tmp_path, capsys):
    changed(kind, golden, tmp_path, capsys, slice(changes.KINDS.index(kind) % SAMPLE, None, SAMPLE))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", changes.KINDS)
def test_every_changed_directory_is_answered_as_by_the_reference_or_refused(kind, golden, tmp_path, capsys):
    changed(kind, golden, tmp_path, capsys, slice(None))


def changed(kind, golden, tmp_path, capsys, part):
    files, computed, counts, wrong = changes.base(kind, tmp_path / "base"), {}, Counter(), []
    cases = [change for change in changes.CHANGES if kind in change.kinds]
    cases += [changes.key_change(kind, *pair) for pair in json.loads(str(golden[f"{kind}|keys"]))]
    for i, change in enumerate(cases[part]):
        path = changes.write(tmp_path / str(i), files, change, tmp_path / "base" / "model.safetensors")
        outcome, why = compared(path, kind, golden.get(f"{kind}|{change.name}"), computed)
        counts[outcome] += 1
        if outcome == "different":
            wrong.append(f"{change.name}: {why}")
    with capsys.disabled():
        print(f"\n{kind}: {dict(sorted(counts.items()))}", end="")
    assert not wrong, "\n".join(wrong)
    assert counts["same"] > counts.total() // 3
    assert counts["unread"] <= 2 + counts.total() // 50, "of common texts"


def compared(path, kind, want, computed):
    """Return what came, and why.

    `same`; `refused` at the start; `unread`: a text is refused in words; `answered` where the reference fails;
    `different`.
    """
    try:
        checkpoint = Checkpoint.open(path, "model")
    except ModelError as error:
        return "refused", error
    with checkpoint:
        try:
            got = answers(checkpoint, kind, computed)
        except ModelError as error:  # of a text; ids are served
            return "refused", error
        except RequestError as error:
            return "unread", error
    if want is None:
        return "different", "there is no answer of the reference; run make_checkpoint_answers.py"
    if is_error(want):
        return "answered", want
    if want.dtype.kind == "U":
        said = [json.loads(one) for one in want]
        if kind not in changes.TEXT:  # with a seeded tokenizer, texts leave control tokens out
            got, said = [tokens for tokens, _ in got], [tokens for tokens, _ in said]
        return ("same" if got == said else "different"), (got, said)
    parts = zip(got, np.split(want, len(got)), strict=True)
    error = max(np.abs(mine - other).max() for mine, other in parts if mine is not None)
    return ("same" if error < TOLERANCE else "different"), error


def is_error(want):
    return want.dtype.kind == "U" and want.ndim == 0


def answers(checkpoint, kind, computed):
    """Return the numbers of every answer, or [tokens, text] of a decoder's; None where control tokens are refused."""
    found = []
    mask = checkpoint.tokenizer.id_to_token(checkpoint.mask_id) if kind.endswith("-mlm") else ""
    for request in changes.requests_of(kind, mask):
        try:
            prepared = read_input(checkpoint, request)
        except RequestError:
            if request.get("text") not in changes.CONTROLS:
                raise
            found.append(None)
            continue
        if kind in changes.DECODERS:
            found.append(generated(checkpoint, prepared, computed))
            continue
        key = (checkpoint.spec, prepared.inputs.tobytes(), prepared.shape)
        if key not in computed:  # most changes change nothing
            computed[key] = reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)[1]
        found.append(flat(checkpoint, decode_output(checkpoint, prepared, computed[key])))
    return found


def flat(checkpoint, answer):
    """Return the numbers of an answer in the order of the outputs."""
    match answer:
        case {"embedding": numbers}:
            return np.array(numbers)
        case {"labels": labels}:
            scores = {entry["label"]: entry["score"] for entry in labels}
            return np.array([scores[label] for label in checkpoint.spec.head.labels])
        case {"masks": masks}:
            return np.concatenate([[t["score"] for t in sorted(m["tokens"], key=lambda t: t["id"])] for m in masks])


def generated(checkpoint, prepared, computed):
    """Return the tokens that follow, and their text."""
    prompt = tuple(prepared.inputs[1:].tolist())
    generation = Generation(prompt, prepared.new_tokens, prepared.shape, prepared.rules)
    while not generation.done:
        ids = (*prompt, *generation.text.tokens)
        key = (checkpoint.spec, ids)
        if key not in computed:
            inputs, shape = np.array([0, *ids], np.int32), prepared.shape.decode_step(len(ids))
            computed[key] = reference(checkpoint.spec, checkpoint.tensors(), inputs, shape)[1]
        generation.append_tokens(computed[key])
    answer = decode_output(checkpoint, prepared, np.array(generation.text.tokens))
    return [answer["ids"], answer["text"]]
