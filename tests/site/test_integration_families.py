"""Families over a real broker and processes: one of each kind of input, and methods with exchanges of their own.

Every method of every family is compared with the reference in tests/unit/strategies, without processes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image
from site_processes import PATIENCE_S, SITE, Site, foretold, running_site, wait_for_plans

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.client.described import random_input
from hepti_mqtt.models.shapes import ImageInput
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import read_input

AGENTS = {"a": "300MiB", "b": "300MiB"}
CASES = (
    ("tiny-debert", "decoupled", {"original": "everywhere"}),
    ("tiny-convnet", "fused_tiles", {"cut": "1", "owners": "leased"}),
)
RANKER = "tiny-bert-ranker"
TOWERS = "tiny-clip"
KINDS = (*(kind for kind, _, _ in CASES), "tiny-resnet", RANKER, TOWERS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("families")
    served = {kind: make_model(kind, directory / kind, seed=i) for i, kind in enumerate(KINDS)}
    yield from running_site(directory, served, AGENTS)


@pytest.fixture(scope="module")
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE, client_id="families") as client:
        wait_for_plans(client, KINDS, AGENTS)
        yield client


def test_a_picture_in_and_labels_out(site: Site, hepti: Hepti) -> None:
    """A picture of another size, cut as the preprocessor says, over both devices."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8)).save(file, "PNG")
    body = {"image": base64.b64encode(file.getvalue()).decode()}
    with Checkpoint.open(site.models["tiny-resnet"], "tiny-resnet") as checkpoint:
        prepared = read_input(checkpoint, body)
        spec, tensors = checkpoint.spec, checkpoint.tensors()
        want = decode_output(checkpoint, prepared, models.reference(spec, tensors, prepared.inputs, prepared.shape)[1])
    got = hepti.infer("tiny-resnet", **body, strategy="map_rows", devices=list(AGENTS), timeout_s=PATIENCE_S)
    assert [label["label"] for label in got.labels] == [label["label"] for label in want["labels"]]
    scores = [[label["score"] for label in labels] for labels in (got.labels, want["labels"])]
    np.testing.assert_allclose(*scores, atol=1e-5)


def test_texts_and_pictures_under_one_name(site: Site, hepti: Hepti) -> None:
    """Both over both devices, and labels of a picture, which take vectors of both."""
    labels = ["a warm room", "a cold door", "light"]
    sentences = [f"This is a photo of {label}." for label in labels]
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (33, 47, 3), dtype=np.uint8)).save(file, "PNG")
    pins = {"strategy": "row", "devices": list(AGENTS), "timeout_s": PATIENCE_S}
    want = []
    for part, body in (
        ("text", {"texts": sentences}),
        ("image", {"image": base64.b64encode(file.getvalue()).decode()}),
    ):
        with Checkpoint.open(site.models[TOWERS], TOWERS, part) as checkpoint:
            prepared = read_input(checkpoint, body)
            _, vectors = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
        got = hepti.infer(TOWERS, **body, **pins)
        assert {*got.plan["devices"]} == {*AGENTS}
        np.testing.assert_allclose(np.reshape(got.embeddings, vectors.shape), vectors, atol=1e-5)
        want.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    scores_of_labels = hepti.infer(TOWERS, image=file.getvalue(), candidate_labels=labels, **pins).labels
    best = np.argsort(-(want[1] @ want[0].T)[0])
    assert [one["label"] for one in scores_of_labels] == [labels[i] for i in best]
    assert sum(one["score"] for one in scores_of_labels) == pytest.approx(1)
    assert TOWERS in hepti.models()
    assert not any("." in name for name in hepti.models())


def test_documents_are_ranked_by_a_query(site: Site, hepti: Hepti) -> None:
    """Pairs with token types, over both devices; as text, and as a user's own ids."""
    documents = ["the door is cold", "a warm light in the room", "camera"]
    body = {"query": "a warm room", "documents": documents}
    with Checkpoint.open(site.models[RANKER], RANKER) as checkpoint:
        prepared = read_input(checkpoint, body)
        spec, tensors = checkpoint.spec, checkpoint.tensors()
        want = decode_output(checkpoint, prepared, models.reference(spec, tensors, prepared.inputs, prepared.shape)[1])
        pairs = [checkpoint.tokenizer.encode("a warm room", document) for document in documents]
    pins = {"strategy": "row", "devices": list(AGENTS), "timeout_s": PATIENCE_S}
    got = hepti.infer(RANKER, **body, **pins)
    assert [rank["index"] for rank in got.ranking] == [rank["index"] for rank in want["ranking"]]
    scores = [[rank["score"] for rank in ranking] for ranking in (got.ranking, want["ranking"])]
    np.testing.assert_allclose(*scores, atol=1e-5)
    ids = {"ids": [pair.ids for pair in pairs], "token_types": [pair.type_ids for pair in pairs]}
    logits = [labels[0]["score"] for labels in hepti.infer(RANKER, **ids, **pins).labels]
    by_index = {rank["index"]: rank["score"] for rank in got.ranking}
    np.testing.assert_allclose([by_index[i] for i in range(3)], 1 / (1 + np.exp(-np.array(logits))), atol=1e-5)


@pytest.mark.parametrize(("kind", "strategy", "options"), CASES)
def test_right_answer_same_bits_exact_bytes(
    site: Site, hepti: Hepti, kind: str, strategy: str, options: dict[str, str]
) -> None:
    with Checkpoint.open(site.models[kind], kind) as checkpoint:
        spec = checkpoint.spec
        body = random_input(spec, 1 if isinstance(spec.input_spec, ImageInput) else 11, seed=5)
        prepared = read_input(checkpoint, {**body, "want": "hidden"})
        hidden, _ = models.reference(spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    pins = {"strategy": strategy, "options": options, "devices": list(AGENTS)}
    first, second = (
        foretold(lambda: hepti.infer(kind, **body, **pins, want="hidden", report=True, timeout_s=PATIENCE_S))
        for _ in range(2)
    )
    np.testing.assert_allclose(first.hidden, hidden, atol=5e-5)
    assert first.hidden.tobytes() == second.hidden.tobytes()
    assert (first.plan["strategy"], first.plan["options"]) == (strategy, options)
    assert set(first.plan["devices"]) == set(AGENTS)
    if "owners" not in options:  # whose tiles are sent and whose are the head's own is seen as they are leased
        assert first.raw["bytes_on_wire"] == first.raw["predicted_bytes"]
