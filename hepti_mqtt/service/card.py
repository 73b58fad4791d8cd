"""The description of a model in its record, for programs that list models."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any, Final

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.models.shapes import DecoderInput, TextInput

_HELLO: Final = [{"role": "user", "content": "hello"}]
_TOOL: Final = [{"type": "function", "function": {"name": "open", "description": "", "parameters": {}}}]
_cards: Final[weakref.WeakKeyDictionary[Checkpoint, dict[str, Any]]] = weakref.WeakKeyDictionary()


def model_card(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a model's card.

    {task, architecture, context: tokens that it reads, parameters, bytes, dtype: of most weights, digest: of the
    manifest, modified: unix seconds, chat, tools, thinking: what its template writes}
    """
    if checkpoint not in _cards:
        _cards[checkpoint] = _build_card(checkpoint)
    return _cards[checkpoint]


def _build_card(checkpoint: Checkpoint) -> dict[str, Any]:
    spec, manifest = checkpoint.spec, checkpoint.manifest
    sizes: dict[str, int] = {}
    nbytes = 0
    for entry in manifest.entries:
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + prod(entry.shape)
        nbytes += sum(tile.nbytes for tile in entry.tiles())
    chat, tools, thinking = _template(checkpoint)
    files = [file for file in checkpoint.path.iterdir() if file.is_file()] if checkpoint.path.is_dir() else []
    reads = spec.input_spec
    return {
        "task": spec.head.task,
        "architecture": spec.architecture,
        "context": reads.longest if isinstance(reads, TextInput) else 0,
        "parameters": sum(sizes.values()),
        "bytes": nbytes,
        "dtype": max(sizes, key=sizes.__getitem__, default=""),
        "digest": manifest.digest.hex(),
        "modified": max((file.stat().st_mtime for file in files), default=0.0),
        "chat": chat,
        "vision": checkpoint.sees,
        "tools": tools,
        "thinking": thinking,
    }


def _template(checkpoint: Checkpoint) -> tuple[bool, bool, bool]:
    """Return whether a model has a chat template, supports tools, and supports thinking."""
    try:
        if not isinstance(checkpoint.spec.input_spec, DecoderInput) or not checkpoint.has_tokenizer:
            return False, False, False
        if (chat := checkpoint.chat) is None:
            return False, False, False
        return True, chat.ids(_HELLO, _TOOL) != chat.ids(_HELLO, None), chat.thinks
    except HeptiError:  # requests that need the template report the error
        return False, False, False
