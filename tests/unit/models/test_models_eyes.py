"""Towers that see for a decoder, and the decoder behind them: equal to transformers."""

from __future__ import annotations

import numpy as np
import pytest
from picture_cases import CASES, encoded

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.models import reference
from hepti_mqtt.models.shapes import TokenBatch, fixed_point
from hepti_mqtt.service.pictures import decode_views

TOLERANCE = 1e-4
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.file.stem)


@pytest.fixture
def parts(tmp_path, case):
    path = make_model(case.kind, tmp_path / "model", case.seed)
    with Checkpoint.open(path) as words, Checkpoint.open(path, part="image") as eyes:
        yield words, eyes


@by_case
def test_views_are_those_of_the_processor(case, parts):
    golden = np.load(case.file)
    items = [(f"images[{i}]", encoded(*size)) for i, size in enumerate(case.sizes)]
    pixels, _ = decode_views(items, parts[1].spec.input_spec, parts[1].views)
    np.testing.assert_array_equal(pixels, golden["views"])


@by_case
def test_rows_and_logits_are_those_of_transformers(case, parts):
    golden, (words, eyes) = np.load(case.file), parts
    views = golden["views"]
    shape = eyes.spec.input_spec.batch(len(views))
    _, rows = reference(eyes.spec, eyes.tensors(), views, shape)
    assert np.abs(rows - golden["rows"]).max() < TOLERANCE
    if words.spec.block.picture_rows:  # the reference reads one run, and a picture is one of its own
        return
    ids, mark = golden["ids"], words.config["image_token_id"]
    added = np.zeros((len(ids), words.spec.hidden), np.float32)
    added[ids == mark] = rows - words.embedding(mark)
    inputs = np.concatenate([[0], ids, fixed_point(added)]).astype(np.int32)
    run = TokenBatch((len(ids),), cache=words.spec.input_spec.cache(len(ids)), added=True)
    _, logits = reference(words.spec, words.tensors(), inputs, run)
    assert np.abs(logits[0] - golden["logits"]).max() < TOLERANCE
