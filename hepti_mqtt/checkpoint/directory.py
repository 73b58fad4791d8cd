"""An open model: a Hugging Face directory, a GGUF file or an ONNX file, with spec, weights, tiles and tokenizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from hepti_mqtt.checkpoint import ctranslate2_file, gguf_file, onnx_file, storage
from hepti_mqtt.checkpoint.chat import ChatTemplate, open_template
from hepti_mqtt.checkpoint.formats import explain_directory, model_directory, refuse_pointers, repository_name
from hepti_mqtt.checkpoint.quantise import Quantisation, measured, quantised_reader
from hepti_mqtt.checkpoint.safetensors_file import RowsFile, WeightsFile, close_all, open_shards, read_json
from hepti_mqtt.checkpoint.storage import TensorReader, WeightsReader, source_reader, zeros_reader
from hepti_mqtt.checkpoint.tokenizer import TextTokenizer, has_tokenizer, open_tokenizer
from hepti_mqtt.checkpoint.torch_file import TorchFile
from hepti_mqtt.core.errors import ModelError, UnsupportedModelError, WeightsChangedError
from hepti_mqtt.core.ids import check_name, part_name, valid_name
from hepti_mqtt.core.plan import CacheDtype, Quantised
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.core.storage import QUANTISED, STORAGES, Storage, StoredRows, Tiles
from hepti_mqtt.models import (
    TensorSource,
    left_unquantised,
    models_of,
    quantised,
    require_transformer,
    spec_from_config,
    tensor_sources,
    towers_of,
    views,
    with_cache,
    with_hugging_face_keys,
    with_storages,
    without_false_tie,
    without_missing_pooler,
)
from hepti_mqtt.models.config import JsonConfig
from hepti_mqtt.models.generation import end_tokens, sampling_defaults
from hepti_mqtt.models.sentences import TextRules, text_rules
from hepti_mqtt.models.shapes import ImageInput, TextInput
from hepti_mqtt.models.speech import SpeechTokens, speech_tokens
from hepti_mqtt.models.tensors import EMBEDDING_TABLE, LOGITS_MATRIX, chosen
from hepti_mqtt.models.towers import Matching, Similarity
from hepti_mqtt.models.transformer import ModelSpec
from hepti_mqtt.models.views import Views
from hepti_mqtt.protocol.manifest import Manifest, TensorEntry, tile_hash, tile_shape
from hepti_mqtt.protocol.plausible import check_spec

# JSON files that spec, tokenizer and requests read; the last pattern is for modules of sentence-transformers.
_EXTRAS: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer_config.json",
    "chat_template.json",
    "generation_config.json",
    "*/config.json",
)
_DESCRIBED: Final = "config.json"  # errors of a spec begin with it
_ADAPTER: Final = "adapter_config.json"
_LISTED: Final = 8  # most names in an error
_WEIGHT: Final = ".weight"
BAND_BYTES: Final = 32 << 20  # largest band of rows that is read together


class _Tile(NamedTuple):
    """A tile of a tensor: its rows and columns in the stored orientation."""

    source: TensorSource
    rows: tuple[int, int]
    columns: tuple[int, int]


class Checkpoint:
    """An open model; close it, or use it in a `with` statement.

    model: the name that people use. name: the name on the site, MODEL.PART for a further model of a directory with
    several (`part_name`), else `model`. config: this model's config.json. extras: the directory's other JSON files by
    relative name. spec: the spec of the model.
    """

    def __init__(
        self,
        path: Path,
        model: str,
        config: Mapping[str, Any],
        extras: Mapping[str, Any],
        files: Sequence[WeightsReader],
        scores: Matching | None = None,
        name: str = "",
        tokenizer: Mapping[str, Any] | None = None,
        weights: Quantised | None = None,
        cache: CacheDtype = "f32",
    ) -> None:
        self.path = path
        self.model = model
        self.name = name or model
        self.config, self.extras = config, extras = with_hugging_face_keys(config, extras)
        self._files = files
        #: The wider storages to which matrices are converted on reading, by storages in the file.
        self.widened = {k: v for file in files if isinstance(file, RowsFile) for k, v in file.widened.items()}
        self._scores = scores
        #: Its prompts may contain pictures, which another model of the directory encodes.
        self.sees = False
        self._tokenizer = tokenizer
        self._stored: dict[str, TensorReader] = {k: v for file in files for k, v in file.tensors.items()}
        self.spec = _kept_as(_stored_spec(path, config, extras, self._stored), weights, cache)
        self._readers = self._as_stored = _match(self._stored, self.spec, path)
        if weights is not None:
            self._readers = {s: self._quantised(s, reader, weights) for s, reader in self._readers.items()}
        if isinstance(self.spec.input_spec, TextInput) and self.has_tokenizer:
            self._check_padding()  # errors of the tokenizer are raised now, not at the first request
        #: The last bands of rows from which tiles were cut, by tensor and first row; the most recent one last.
        self._bands: OrderedDict[tuple[TensorSource, int], npt.NDArray[Any]] = OrderedDict()

    @classmethod
    def open(
        cls,
        path: str | Path,
        model: str | None = None,
        part: str | None = None,
        weights: Quantised | None = None,
        cache: CacheDtype = "f32",
    ) -> Checkpoint:
        """Open the directory `path`, or a GGUF or ONNX file.

        model: its name on the site, by default from the path. part: one of the directory's models (`model_parts`), by
        default the first. weights: quantise matrices; None: leave them. cache: dtype of sessions' keys and values.

        Raises ModelError (UnsupportedModelError) for a missing directory or file, broken JSON, missing tensors, tensors
        of another shape, truncated weights; BadNameError for a name that cannot stand in a topic.
        """
        path = model_directory(Path(path))
        onnx, gguf = onnx_file.find_onnx(path), gguf_file.find_gguf(path)
        if onnx is None and gguf is None and not path.is_dir():
            raise ModelError(f"{path} is not a directory; give the Hugging Face directory that holds config.json")
        name = check_name("model", model if model is not None else model_name(path))
        root = path if path.is_dir() else path.parent
        refuse_pointers([root / "tokenizer.json"])
        extras = _extras(root)
        if onnx is not None:
            described = root / "config.json"
            net = onnx_file.OnnxFile(onnx, read_json(described) if described.is_file() else {})
            return cls(path, name, net.config, extras, [net], weights=weights, cache=cache)
        if gguf is not None:
            file = gguf_file.GgufFile(gguf)
            within = gguf_file.gguf_extras(file, extras)
            try:
                opened = cls(path, name, file.config, within, [file], None, "", file.tokenizer, weights, cache)
                opened._refuse_unread(opened._unread())
            except BaseException as error:
                file.close()
                if isinstance(error, ModelError) and str(error).startswith(_DESCRIBED):
                    said = str(error).removeprefix(_DESCRIBED)
                    raise type(error)(f"{gguf}: its metadata, under keys of config.json{said}") from error
                raise
            return opened
        if (path / _ADAPTER).is_file():
            raise UnsupportedModelError(
                f"{path} has {_ADAPTER}, and adapters are not supported; merge it into the weights: "
                "model.merge_and_unload().save_pretrained(directory)"
            )
        described = path / "config.json"
        opening = _opening(path)
        config = read_json(described) if described.is_file() or opening is not None else {}
        if opening is None and (converted := ctranslate2_file.find(path)) is not None:
            converted_file = ctranslate2_file.CTranslate2File(converted, config)
            return cls(path, name, converted_file.config, extras, [converted_file], weights=weights, cache=cache)
        if "architectures" not in config and opening is None:
            raise ModelError(f"{path} is not a readable model: {explain_directory(path)}")
        towers, parts = towers_of(config), models_of(config)
        part = next(iter(parts)) if part is None else part
        config, own = parts[part], name if part == next(iter(parts)) else part_name(name, part)
        # The spec first: the error of an unsupported architecture says more than that of a missing tensor.
        spec = _plausible_spec(path, *with_hugging_face_keys(config, extras))
        if opening is None:
            raise ModelError(f"{path} has neither model.safetensors nor its index: {explain_directory(path)}")
        files = [*opening()]
        try:
            if names := towers.renamed.get(part):
                files = [_Renamed(file, partial(_with_prefix, names)) for file in files]
            files += [_opened_folder(path, projection.path) for projection in spec.head.projections]
            opened_part = cls(path, name, config, extras, files, towers.matching, own, weights=weights, cache=cache)
            opened_part._refuse_unread(opened_part._unread_in_layers())
        except BaseException:
            close_all(files)
            raise
        opened_part.sees = towers.sees and opened_part.name == opened_part.model
        return opened_part

    def close(self) -> None:
        """Close the weight files; a second call does nothing."""
        close_all(self._files)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tensors(self, banded: bool = False) -> Mapping[str, npt.NDArray[np.float32]]:
        """Return all tensors by canonical name: f32, [in, out]; each access reads the tensor again.

        banded: large matrices stay in the file and read a band of rows at a time; they support x @ W and look-ups of
        rows only.
        """
        return _Tensors(self._readers, banded)

    def tensors_as_stored(self, banded: bool = False) -> Mapping[str, npt.NDArray[np.float32]]:
        """Return all tensors as `tensors` does, without quantisation."""
        return _Tensors(self._as_stored, banded)

    @cached_property
    def quantisation(self) -> Quantisation | None:
        """Return the errors of quantised weights; None if they are as stored."""
        pairs = [(s, self._as_stored[s], t) for s, t in self._readers.items() if t is not self._as_stored[s]]
        if not pairs or not isinstance(self.spec, ModelSpec):
            return None
        return measured(pairs[0][2].dtype, pairs, left_unquantised(self.spec))

    def _quantised(self, source: TensorSource, reader: TensorReader, how: Quantised) -> TensorReader:
        """Return a tensor's reader for devices; token embeddings are quantised if the matrix to the logits is tied."""
        assert isinstance(self.spec, ModelSpec)
        tied = (
            source.name == EMBEDDING_TABLE and self.spec.storage_of(LOGITS_MATRIX) is not None and self.spec.head.tied
        )
        if not tied and self.spec.storage_of(source.name) is None:
            return reader
        return quantised_reader(source.primary_name, reader, STORAGES[QUANTISED[how]])

    def weights(self) -> Mapping[str, npt.NDArray[np.float32] | StoredRows]:
        """Return all tensors as devices get them: as `tensors` does, but matrices in blocks as `StoredRows`."""
        return _Weights(self._readers)

    def tiles(self, words: Collection[int]) -> Mapping[str, Tiles]:
        """Return bands of rows of all tensors, as devices get them; of token embeddings only the rows of `words`.

        words: token ids of a request, with types as in `TextStem.types`.
        """
        return _Bands(self._readers, words)

    @cached_property
    def manifest(self) -> Manifest:
        """Return the tiles of all tensors; hashes every weight unless the user's cache knows these files."""
        sources, kept = tuple(self._readers), self._manifest_cache
        manifest = storage.load_cached_manifest(kept, self.name)
        if manifest is None:
            manifest = Manifest(self.name, tuple(self._entry(source) for source in sources))
            storage.store_cached_manifest(kept, manifest)
        return manifest

    @cached_property
    def _manifest_cache(self) -> Path:
        stamps = (stamp for file in self._files for stamp in file.stamps)
        storages = self.spec.storages if isinstance(self.spec, ModelSpec) else ()
        return storage.manifest_cache_path(stamps, self._stored, self._readers, storages)

    def tile(self, digest: bytes) -> bytes:
        """Return the bytes of the tile named `digest`.

        Raises KeyError for a name that is not in the manifest, ModelError if the files have changed since they were
        hashed.
        """
        tile = self._tiles[digest]
        data = self._tile_bytes(tile.source, tile.rows, tile.columns)
        if tile_hash(data) != digest:
            # A decaying disk changes no file time, so the next start must hash the weights again.
            self._manifest_cache.unlink(missing_ok=True)
            raise WeightsChangedError(
                f"the weights in {self.path} changed while model {self.model} was served; start the planner again"
            )
        return data

    @cached_property
    def _tiles(self) -> Mapping[bytes, _Tile]:
        tiles: dict[bytes, _Tile] = {}
        by_name = {source.name: source for source in self._readers}
        for entry in self.manifest.entries:
            source = by_name[entry.name]
            for place in entry.tiles():
                row, column = (place.column0, place.row0) if source.transposed else (place.row0, place.column0)
                rows, columns = place.stored_shape
                tiles.setdefault(place.hash, _Tile(source, (row, row + rows), (column, column + columns)))
        return tiles

    def _entry(self, source: TensorSource) -> TensorEntry:
        (rows, columns), dtype = source.matrix_shape, self._storage(source).name
        height, width = tile_shape((rows, columns), dtype, len(source.shape) == 1)
        hashes = tuple(
            tile_hash(self._tile_bytes(source, (row, min(rows, row + height)), (column, min(columns, column + width))))
            for row in range(0, rows, height)
            for column in range(0, columns, width)
        )
        return TensorEntry(source.name, source.shape, dtype, source.transposed, hashes)

    def _storage(self, source: TensorSource) -> Storage:
        """Return the storage of a tensor's tiles."""
        reader = self._readers[source]
        return STORAGES["f16" if reader.dtype == "F16" else reader.dtype if reader.raw is not None else "f32"]

    def _tile_bytes(self, source: TensorSource, rows: tuple[int, int], columns: tuple[int, int]) -> bytes:
        """Return one tile's bytes; its band of rows is cached until the last tile of the band was read."""
        bands, band_of = self._bands, (source, rows[0])
        width, reader = source.matrix_shape[1], self._readers[source]
        band = bands.pop(band_of, None)
        if band is None:
            band = (reader.raw or reader.read)(*rows, width)
        if columns[1] < width:
            bands[band_of] = band
            while len(bands) > 1 and sum(kept.nbytes for kept in bands.values()) > BAND_BYTES:
                bands.popitem(last=False)
        storage = self._storage(source)
        first, last = (storage.row_bytes(column) if storage.block > 1 else column for column in columns)
        return band[:, first:last].tobytes()

    @cached_property
    def similarity(self) -> Similarity | None:
        """Return how vectors of texts and pictures are compared, None if the directory has no models for both.

        Raises ModelError if its scale or bias is missing.
        """
        return None if self._scores is None else self._scores.similarity(self._number)

    def _number(self, name: str) -> float:
        reader = self._stored.get(name)
        if reader is None or not reader.is_float or prod(reader.shape) != 1:
            raise ModelError(f"{self.path} lacks the number {name}, by which texts and pictures are compared; copy it")
        return float(reader.read(0, 1, 1)[0, 0])

    def _refuse_unread(self, unread: Collection[str]) -> None:
        """Raise UnsupportedModelError for unread stored tensors, because answers would be wrong without them."""
        if unread:
            raise UnsupportedModelError(
                f"{self.path} has tensors that are not supported in {self.spec.architecture}: {_shortened(unread)}; "
                "give the original model with model.safetensors"
            )

    def _unread(self) -> list[str]:
        """Return the names of unread stored tensors."""
        unread = dict.fromkeys(self._stored)
        for source in self._readers:
            for name in (chosen(source.stored, self._stored), *source.folded_shapes(self._stored)):
                unread.pop(name, None)
        return list(unread)

    def _unread_in_layers(self) -> list[str]:
        """Return the unread tensors of modules with a read weight, such as a bias that config.json does not mention.

        Other unread tensors belong to other tasks or to training.
        """
        others = {name for source in self._readers for name in source.stored}  # alternative names of read tensors
        unread = [name for name in self._unread() if name not in others and self._stored[name].is_float]
        layers = {name.removesuffix(_WEIGHT) for name in self._stored.keys() - set(unread) if name.endswith(_WEIGHT)}
        return [name for name in unread if not layers.isdisjoint(_prefixes(name))]

    @property
    def has_tokenizer(self) -> bool:
        """Return whether there is a tokenizer, readable or not, and the model does not read images."""
        has_one = self._tokenizer is not None or has_tokenizer(self.path)
        return has_one and not isinstance(self.spec.input_spec, ImageInput)

    @cached_property
    def texts(self) -> TextTokenizer:
        """Return the tokenizer with its rules for texts; raises ModelError if there is none, or a bad one."""
        task = self.spec.head.task
        return open_tokenizer(
            self.path,
            self.config,
            self.extras,
            masks=task == "masked_token",
            lower=self.text_rules.lower == "normalizer",
            generates=task == "generation",
            within=self._tokenizer,
        )

    def _check_padding(self) -> None:
        """Raise ModelError if texts have the padding id and positions begin after it: the model would skip it."""
        stem = self.spec.text if isinstance(self.spec, ModelSpec) else None
        used = {*self.texts.tokenizer.encode("a").ids, self.texts.mask}
        if stem is not None and stem.position_offset and stem.position_offset - 1 in used:
            raise ModelError(
                f"config.json: pad_token_id {stem.position_offset - 1} is a token that texts have; restore the file"
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer without padding and truncation; raises ModelError if there is none, or a bad one."""
        return self.texts.tokenizer

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """Return the chat template, None if the model has none; raises as `open_template` does."""
        return open_template(self.path, self.extras, self.tokenizer)

    @cached_property
    def views(self) -> Views:
        """Return how pictures are divided for a decoder's tower of pictures."""
        return views(self.config, self.extras)

    def embedding(self, token: int) -> npt.NDArray[np.float32]:
        """Return a token's embedding in a decoder, with its factor, [h]."""
        spec = require_transformer(self.spec)
        assert spec.text is not None
        source = next(source for source in self._readers if source.name == EMBEDDING_TABLE)
        row = self._readers[source].read(token, token + 1, spec.hidden)[0]
        return np.asarray(row.astype(np.float32) * np.float32(spec.text.scale))

    @cached_property
    def marked(self) -> Tokenizer:
        """Return a tokenizer that encodes the names of special tokens in a text as these tokens."""
        tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        tokenizer.encode_special_tokens = False
        return tokenizer

    @cached_property
    def text_rules(self) -> TextRules:
        """Return the changes of texts before the tokenizer, none except for sentence embeddings."""
        return text_rules(self.extras) if self.spec.head.task == "embedding" else TextRules()

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens after which a decoder's text ends."""
        reads = self.spec.input_spec
        vocab = reads.vocab if isinstance(reads, TextInput) else 0
        return end_tokens(JsonConfig("config.json", self.config), self.extras, vocab)

    @cached_property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Return the default sampling options of requests."""
        return sampling_defaults(self.extras)

    @cached_property
    def speech(self) -> SpeechTokens:
        """Return the control tokens of speech; raises ModelError without the model's own tokenizer."""
        ids: Mapping[str, int] = self.tokenizer.get_vocab()
        return speech_tokens(ids, self.spec.head.outputs, self.config, self.extras)

    @property
    def languages(self) -> tuple[str, ...]:
        """Return the codes of a speech model's languages; none for other models."""
        speaks = self.spec.head.task == "transcription"
        return tuple(sorted(self.speech.languages)) or ("en",) if speaks else ()

    @property
    def padding_id(self) -> int:
        """Return the id of the padding token; raises ModelError if the tokenizer names none."""
        if not self.has_tokenizer or self.texts.padding is None:
            raise ModelError(
                f"{self.path}: texts are filled up with the padding token, and no tokenizer names it; copy "
                "tokenizer.json and tokenizer_config.json, or send ids that are filled up"
            )
        return self.texts.padding

    @property
    def mask_id(self) -> int:
        """Return the id of the mask token; raises ModelError if the tokenizer has none."""
        if self.texts.mask is None:
            raise ModelError(f"{self.path / 'tokenizer.json'} has no mask token; masked-token requests need one")
        return self.texts.mask


class _Tensors(Mapping[str, Any]):
    """Tensors by canonical name, f32; each access reads one. banded: large matrices are `_Banded`."""

    def __init__(self, stored: Mapping[TensorSource, TensorReader], banded: bool = False) -> None:
        self._by_name = {source.name: (source, reader) for source, reader in stored.items()}
        self._banded = banded

    def __getitem__(self, name: str) -> Any:
        source, reader = self._by_name[name]
        rows, columns = source.matrix_shape
        if self._banded and rows > 1 and 4 * rows * columns > BAND_BYTES:
            return _Banded(reader, (rows, columns), source.transposed)
        array = reader.read(0, rows, columns).astype(np.float32, copy=False)
        return array.T if source.transposed else array.reshape(source.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


class _Weights(_Tensors):
    """Tensors by canonical name; matrices in blocks are `StoredRows`."""

    def __getitem__(self, name: str) -> Any:
        source, reader = self._by_name[name]
        if reader.raw is None or not source.transposed:
            return super().__getitem__(name)
        return StoredRows(STORAGES[reader.dtype], reader.raw(0, *source.matrix_shape))


class _Bands(_Tensors):
    """Bands of rows of tensors by canonical name, each with its first row and column."""

    def __init__(self, stored: Mapping[TensorSource, TensorReader], words: Collection[int]) -> None:
        super().__init__(stored)
        self._words = words

    def __getitem__(self, name: str) -> Any:
        source, reader = self._by_name[name]
        rows, columns = source.matrix_shape
        bands = _bands(rows, columns)
        if name in (EMBEDDING_TABLE, LOGITS_MATRIX):
            bands = [(word, word + 1) for word in sorted({int(word) % rows for word in self._words})]
        for start, stop in bands:
            if reader.raw is not None and source.transposed:
                yield StoredRows(STORAGES[reader.dtype], reader.raw(start, stop, columns)), 0, start
            else:
                band = reader.read(start, stop, columns).astype(np.float32, copy=False)
                yield (band.T, 0, start) if source.transposed else (band, start, 0)


class _Banded:
    """A matrix that stays in its file: x @ matrix and look-ups of rows read a band at a time."""

    __array_ufunc__ = None  # `x @ matrix` calls `__rmatmul__`
    dtype: Final = np.dtype(np.float32)

    def __init__(self, reader: TensorReader, stored_shape: tuple[int, int], transposed: bool) -> None:
        self._reader, self._stored_shape, self._transposed = reader, stored_shape, transposed

    @property
    def T(self) -> _Banded:  # noqa: N802 (an array's name)
        """Return the transpose."""
        return _Banded(self._reader, self._stored_shape, not self._transposed)

    def __rmatmul__(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._transposed:
            return np.concatenate([x @ self._read(*band).T for band in _bands(*self._stored_shape)], axis=-1)
        total = np.zeros((*x.shape[:-1], self._stored_shape[1]), np.result_type(x, np.float32))
        for start, stop in _bands(*self._stored_shape):
            total += x[..., start:stop] @ self._read(start, stop)
        return total

    def __len__(self) -> int:
        return self._stored_shape[int(self._transposed)]

    def __getitem__(self, rows: Any) -> npt.NDArray[Any]:
        if self._transposed:
            raise TypeError("rows of a transposed matrix are not stored together; use a product")
        return np.concatenate([self._read(row, row + 1) for row in np.arange(len(self))[rows].tolist()])

    def reshape(self, *shape: int) -> npt.NDArray[Any]:
        """Return the whole matrix in another shape."""
        whole = self._read(0, self._stored_shape[0])
        return (whole.T if self._transposed else whole).reshape(*shape)

    def _read(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self._reader.read(start, stop, self._stored_shape[1]).astype(np.float32, copy=False)


def _bands(rows: int, columns: int) -> list[tuple[int, int]]:
    """Return first and last rows of bands that fit into `BAND_BYTES` as f32."""
    height = max(BAND_BYTES // (4 * max(columns, 1)), 1)
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]


def model_name(path: Path) -> str:
    """Return a model name from a path's last part: lower case, with hyphens in place of other characters."""
    return valid_name(repository_name(path.resolve()).lower().removesuffix(".onnx").removesuffix(".gguf")) or "model"


def model_parts(path: str | Path) -> tuple[str, ...]:
    """Return the names of a directory's models, for `Checkpoint.open`'s `part`; a single model has an empty name.

    Raises ModelError for a config.json that cannot be read.
    """
    described = model_directory(Path(path)) / "config.json"
    return tuple(models_of(read_json(described))) if described.is_file() else ("",)


def described_spec(path: str | Path, weights: Quantised | None = None, cache: CacheDtype = "f32") -> Spec:
    """Return the spec of a model without its weights: by its config.json, or by the header of a GGUF file.

    weights, cache: as in `Checkpoint.open`. Raises ModelError for files that cannot be read.
    """
    path = model_directory(Path(path))
    if (gguf := gguf_file.find_gguf(path)) is not None:
        file = gguf_file.GgufFile(gguf, whole=False)
        try:
            spec = _stored_spec(path, *with_hugging_face_keys(file.config, {}), file.tensors)
        finally:
            file.close()
    else:
        parts = models_of(read_json(path / "config.json"))
        spec = _plausible_spec(path, *with_hugging_face_keys(next(iter(parts.values())), _extras(path)))
    return _kept_as(spec, weights, cache)


def _extras(root: Path) -> dict[str, Any]:
    """Return the other JSON files of a directory by relative name."""
    files = (file for pattern in _EXTRAS for file in sorted(root.glob(pattern)))
    return {file.relative_to(root).as_posix(): read_json(file) for file in files}


def _stored_spec(
    path: Path, config: Mapping[str, Any], extras: Mapping[str, Any], stored: Mapping[str, TensorReader]
) -> Spec:
    """Return the spec of a model with these tensors."""
    spec = without_missing_pooler(_plausible_spec(path, config, extras), stored)
    spec = without_false_tie(spec, stored)
    matched = _match(stored, spec, path)
    in_blocks = {source.name: reader.dtype for source, reader in matched.items() if reader.raw is not None}
    return with_storages(spec, in_blocks)


def _kept_as(spec: Spec, weights: Quantised | None, cache: CacheDtype) -> Spec:
    return with_cache(spec if weights is None else quantised(spec, weights), cache)


def _plausible_spec(path: Path, config: Mapping[str, Any], extras: Mapping[str, Any]) -> Spec:
    """Return the spec of a directory; raises UnsupportedModelError if every device would refuse it."""
    spec = spec_from_config(config, extras)
    try:
        check_spec(spec.to_dict())
    except ValueError as error:
        raise UnsupportedModelError(
            f"{path}: devices would refuse this model ({error}); correct config.json, or use a smaller model"
        ) from error
    return spec


def _opening(directory: Path) -> Callable[[], Sequence[WeightsReader]] | None:
    """Return what opens the weights of a directory, one file or shards, safetensors first; None without any."""
    for name, file in (("model.safetensors", WeightsFile), ("pytorch_model.bin", TorchFile)):
        if (directory / name).is_file():
            return lambda file=file, name=name: [file(directory / name)]  # type: ignore[misc]
        if (directory / f"{name}.index.json").is_file():
            return partial(open_shards, directory / f"{name}.index.json", file)
    return None


class _Renamed:
    """Weights under other names; rename: from the stored name to the family's name."""

    def __init__(self, file: WeightsReader, rename: Callable[[str], str]) -> None:
        self._file = file
        self.stamps = file.stamps
        self.tensors = {rename(name): reader for name, reader in file.tensors.items()}

    def close(self) -> None:
        self._file.close()


def _with_prefix(names: Mapping[str, str], name: str) -> str:
    """Return the family's name of a stored tensor; names: stored prefix -> the family's prefix."""
    first = next((first for first in names if name.startswith(first)), None)
    return name if first is None else names[first] + name.removeprefix(first)


def _opened_folder(directory: Path, name: str) -> _Renamed:
    """Return the open weights of a module, as `folder/tensor`; raises ModelError if there are no weights."""
    opening = _opening(directory / name)
    if opening is None:
        raise ModelError(f"{directory / name} has no model.safetensors; copy the whole folder of the model")
    (file,) = opening()
    return _Renamed(file, lambda tensor: f"{name}/{tensor}")


def _match(stored: Mapping[str, TensorReader], spec: Spec, path: Path) -> Mapping[TensorSource, TensorReader]:
    """Return the stored tensor of each source; raises ModelError for missing tensors and other shapes."""
    matched: dict[TensorSource, TensorReader] = {}
    missing: dict[str, None] = {}
    wrong: dict[str, None] = {}
    for source in tensor_sources(spec):
        if not source.stored:
            matched[source] = zeros_reader(source.stored_shape)
            continue
        name = next((name for name in source.stored if name in stored), source.primary_name)
        place = source.place_in(stored)
        for part, shape in {
            name: source.stored_shape if place is None else place.shape,
            **source.folded_shapes(stored),
        }.items():
            if part not in stored:
                missing[part] = None
            elif stored[part].shape != shape:
                wrong[f"{part} is {list(stored[part].shape)} instead of {list(shape)}"] = None
            elif not stored[part].is_float:
                dtype = stored[part].dtype
                wrong[f"{part} has the dtype {dtype}, which is not supported (F32, F16, BF16, F64 are)"] = None
        if name in stored:
            matched[source] = source_reader(source, stored, name)
    if missing:
        raise ModelError(f"{path} lacks {_shortened(missing)}; {_why_missing(next(iter(missing)), stored)}")
    if wrong:
        raise ModelError(f"{path}: {_shortened(wrong)}; config.json and the weights must be of the same model")
    if not matched:
        raise ModelError(f"{path} has no weights; export the model with its weights")
    return matched


def _why_missing(name: str, stored: Collection[str]) -> str:
    """Return why a tensor is missing and what to do, by the names of stored tensors."""
    if any(".base_layer." in other for other in stored):
        return "it has an adapter in it, which must be merged: model.merge_and_unload().save_pretrained(DIR)"
    longer = next((other for other in stored if other.endswith(f".{name}")), None)
    if longer is not None:
        before = longer.removesuffix(name)
        return f"its names begin with {before!r}, as a training program writes them: save the model within it"
    return "config.json and the weights must be of the same model"


def _prefixes(name: str) -> set[str]:
    """Return the names of the modules around a tensor."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def _shortened(items: Collection[str]) -> str:
    more = len(items) - _LISTED
    return ", ".join([*items][:_LISTED]) + (f" and {more} more" if more > 0 else "")
