"""Request shapes belong to the families: plain forms are their inverses, and nobody else reads their fields."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from sites import EVERY_FAMILY

import hepti_mqtt
from hepti_mqtt import models
from hepti_mqtt.errors import PlanError
from hepti_mqtt.models.shapes import Images, PackedTokens
from hepti_mqtt.runtime.worker.residents import shape_of
from hepti_mqtt.spec import PlainShape

PACKAGE = Path(hepti_mqtt.__file__).parent
# Names that no other object has: read of anything they are a shape's.
ONLY_OF_SHAPES = {"mask_rows"}
# Names that other objects have too: a shape's where the object is called so.
OF_SHAPES = {"lengths", "starts", "tokens", "cache"}
CLASSES = {"PackedTokens", "PackedShape", "Images"}


def _called(node: ast.expr) -> str:
    """Return the name by which an expression is known: of a variable, an attribute or what is called."""
    if isinstance(node, ast.Call):
        return _called(node.func)
    if isinstance(node, ast.Subscript):
        return _called(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def readings(source: str) -> list[str]:
    """Return what a module reads of a family's shape: fields, and the classes themselves."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "hepti_mqtt.models.shapes":
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.Attribute):
            of_shape = "shape" in _called(node.value) or _called(node.value) in ("asking", "step", "joined")
            if node.attr in CLASSES | ONLY_OF_SHAPES or (node.attr in OF_SHAPES and of_shape):
                found.append(ast.unparse(node))
    return found


def test_no_module_outside_the_families_reads_what_only_a_family_knows() -> None:
    others = [p for p in PACKAGE.rglob("*.py") if PACKAGE / "models" not in p.parents]
    assert len(others) > 100
    found = {str(p.relative_to(PACKAGE)): readings(p.read_text(encoding="utf-8")) for p in others}
    assert {name: read for name, read in found.items() if read} == {}


@pytest.mark.parametrize(
    "source",
    [
        "run.shape.tokens",
        "len(shape.lengths)",
        "largest_shape(spec).tokens",
        "part.mask_rows",
        "shapes[0].starts",
        "shape.asking('task').cache",
        "from hepti_mqtt.models.shapes import PackedTokens",
    ],
)
def test_such_a_reading_is_found(source: str) -> None:
    assert readings(source)
    assert readings("item.tokens + forecast.tokens + self.starts[0] + shape.size") == []


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_a_shape_comes_back_from_its_plain_form(name: str) -> None:
    spec = EVERY_FAMILY[name]
    for shape in (models.largest_shape(spec), models.shape_for(spec, 3, 2), models.shape_for(spec, 3).asking("hidden")):
        again = spec.reads.shape_of(shape.plain())
        assert (again, hash(again), type(again)) == (shape, hash(shape), type(shape))
        assert shape.size == sum(shape.sizes) == shape.plain().size


def test_items_that_are_joined_can_be_taken_apart() -> None:
    tokens = PackedTokens((3, 5), mask_rows=(1, 4)).joined([PackedTokens((2,), mask_rows=(0,))])
    assert tokens == PackedTokens((3, 5, 2), mask_rows=(1, 4, 8))
    assert tokens.marked == ((0, 1), (1, 1), (2, 0))
    part, where = tokens.part(1, 3)
    assert part == PackedTokens((5, 2), mask_rows=(1, 5))
    assert np.arange(10)[where].tolist() == [3, 4, 5, 6, 7, 8, 9]
    images = Images(2, 5).joined([Images(1, 5)])
    assert images.part(1, 3) == (Images(2, 5), slice(1, 3))


def test_a_session_is_not_divided_and_images_have_none() -> None:
    prompt = PackedTokens((3,), cache=64)
    assert prompt.part(0, 1) == (prompt, slice(None))
    assert prompt.step(1) == PackedTokens((1,), cache=64)
    with pytest.raises(ValueError, match="session"):
        prompt.part(0, 0)
    with pytest.raises(ValueError, match="no session"):
        Images(1).step(1)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("vit-classifier", PlainShape((3,))),
        ("tiny-convnet", PlainShape((1,), marks=(0,))),
        ("bert-embedding", PlainShape((3,), session_rows=8)),
        ("vit-classifier", PlainShape((2**20,))),
        ("tiny-gpt2", PlainShape((1,), session_rows=2**20)),
    ],
)
def test_a_forged_shape_of_another_family_is_refused(name: str, plain: PlainShape) -> None:
    with pytest.raises(PlanError, match="shape"):
        shape_of(EVERY_FAMILY[name], plain)
