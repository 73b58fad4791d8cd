"""Families over a real broker and processes: towers under one name, and methods with exchanges of their own.

Every method of every family is compared with the reference in tests/unit/strategies, without processes.
"""

from __future__ import annotations

import numpy as np
import pytest
from service_support import encoded, noise
from site_processes import PATIENCE_S, client_of, foretold, site_of

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.client.described import random_input

AGENTS = {"a": "300MiB", "b": "300MiB"}
CASES = (
    ("tiny-debert", "decoupled", {"original": "everywhere"}, 11),
    ("tiny-convnet", "fused_tiles", {"cut": "1", "owners": "leased"}, 1),
)
TOWERS = "tiny-clip"
site = site_of({kind: kind for kind in (*(kind for kind, *_ in CASES), TOWERS)}, AGENTS)
hepti = client_of()


def test_texts_and_pictures_under_one_name(site, hepti):
    """Both over both devices, and labels of a picture, which take vectors of both."""
    labels = ["a warm room", "a cold door", "light"]
    picture = noise(47, 33)
    pins = {"strategy": "row", "devices": list(AGENTS), "timeout_s": PATIENCE_S}
    want = []
    for part, body in (
        ("text", {"texts": [f"This is a photo of {label}." for label in labels]}),
        ("image", {"image": encoded(picture)}),
    ):
        _, vectors = site.reference(TOWERS, part, **body)
        got = hepti.infer(TOWERS, **body, **pins)
        assert {*got.plan["devices"]} == {*AGENTS}
        np.testing.assert_allclose(np.reshape(got.embeddings, vectors.shape), vectors, atol=1e-5)
        want.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    scores_of_labels = hepti.infer(TOWERS, image=picture, candidate_labels=labels, **pins).labels
    best = np.argsort(-(want[1] @ want[0].T)[0])
    assert [one["label"] for one in scores_of_labels] == [labels[i] for i in best]
    assert sum(one["score"] for one in scores_of_labels) == pytest.approx(1)
    assert TOWERS in hepti.models()
    assert not any("." in name for name in hepti.models())


@pytest.mark.parametrize(("kind", "strategy", "options", "length"), CASES)
def test_right_answer_same_bits_exact_bytes(site, hepti, kind, strategy, options, length):
    body = random_input(spec_of_kind(kind), length, seed=5)
    pins = {"strategy": strategy, "options": options, "devices": list(AGENTS), "timeout_s": PATIENCE_S}
    first, second = (foretold(lambda: hepti.infer(kind, **body, **pins, want="hidden", report=True)) for _ in range(2))
    np.testing.assert_allclose(first.hidden, site.reference(kind, **body, want="hidden")[0], atol=5e-5)
    assert first.hidden.tobytes() == second.hidden.tobytes()
    assert (first.plan["strategy"], first.plan["options"]) == (strategy, options)
    assert set(first.plan["devices"]) == set(AGENTS)
    if "owners" not in options:  # whose tiles are sent and whose are the head's own is seen as they are leased
        assert first.raw["bytes_on_wire"] == first.raw["predicted_bytes"]
