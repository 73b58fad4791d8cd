"""llama.cpp's shared libraries in this process: tokens in, logits out.

From npm's `@node-llama-cpp/linux-x64` (`npm pack`, then unpack), which has a library for each kind of CPU. Its structs
change between versions: they are passed as their defaults, in more room than any version needs, and only the sizes that
every version begins with are set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.errors import ConfigError

LIBRARIES: Final = ("ggml-base", "ggml", "llama")


class _Room(ctypes.Structure):
    """Parameters: what callees read of them comes first."""

    _fields_ = (("words", ctypes.c_uint32 * 128),)


class _Batch(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 7),)


class LlamaCpp:
    """A model in llama.cpp with one context; raises ConfigError for what cannot be loaded."""

    def __init__(self, libraries: Path, cpu: str, model: Path, rows: int, threads: int) -> None:
        """cpu: whose library, such as zen4 or haswell; rows: of the context."""
        for name in LIBRARIES:
            found = sorted(libraries.glob(f"lib{name}.so*")) + sorted(libraries.glob(f"lib{name}.v*.so"))
            if not found:
                raise ConfigError(f"{libraries} has no lib{name}; unpack the npm package and name its bins/linux-x64")
            library = ctypes.CDLL(str(found[0]), ctypes.RTLD_GLOBAL)
            if name == "ggml":
                load = library.ggml_backend_load
                load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
                if not load(str(libraries / f"libggml-cpu-{cpu}.so").encode()):
                    raise ConfigError(f"libggml-cpu-{cpu}.so cannot be loaded; name another CPU")
        self._library = _declared(library)
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self._alive = quiet
        self._library.llama_log_set(quiet, None)
        self._model = self._library.llama_model_load_from_file(
            str(model).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise ConfigError(f"llama.cpp cannot load {model}")
        params = self._library.llama_context_default_params()
        params.words[0] = rows
        self._context = self._library.llama_init_from_model(self._model, params)
        self._library.llama_set_n_threads(self._context, threads, threads)
        vocabulary = self._library.llama_model_get_vocab(self._model)
        self._tokens = self._library.llama_vocab_n_tokens(vocabulary)

    def begin(self) -> None:
        """Forget what came before."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def add(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Add tokens to the sequence; return the logits of the last, f32 [vocabulary]."""
        given = (ctypes.c_int32 * len(ids))(*ids)
        if self._library.llama_decode(self._context, self._library.llama_batch_get_one(given, len(ids))):
            raise RuntimeError("llama.cpp could not go on; was the context too short?")
        return np.ctypeslib.as_array(self._library.llama_get_logits_ith(self._context, -1), (self._tokens,)).copy()


def _declared(library: Any) -> Any:
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    for name, result, arguments in (
        ("llama_log_set", None, None),
        ("llama_model_default_params", _Room, []),
        ("llama_context_default_params", _Room, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _Room]),
        ("llama_init_from_model", pointer, [pointer, _Room]),
        ("llama_set_n_threads", None, [pointer, number, number]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", number, [pointer]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
        ("llama_batch_get_one", _Batch, [pointer, number]),
        ("llama_decode", number, [pointer, _Batch]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, number]),
    ):
        function = getattr(library, name)
        function.restype = result
        if arguments is not None:
            function.argtypes = arguments
    return library
