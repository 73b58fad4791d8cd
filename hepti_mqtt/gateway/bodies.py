"""Bodies of requests: read within bounds, and checked by their pydantic models, which also describe them."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema
from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from hepti_mqtt.core.errors import OverloadedError, RequestError
from hepti_mqtt.gateway.errors import HttpError
from hepti_mqtt.service.options import Option

MAX_BODY_BYTES: Final = 32 << 20  # some pictures in base64, or 2,048 long texts
ROOM_BYTES: Final = 256 << 20
BODY_S: Final = 30.0  # a client that sends one byte a second does not hold a connection for longer
MAX_FIELDS: Final = 64  # of a form
TEXTS_AT_ONCE: Final = 2048  # as OpenAI's limit
FORM: Final = "multipart/form-data"
_SHOWN: Final = 40  # characters of a value in an error
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})  # change nothing in any interface

_PICTURES: Final = frozenset({"image", "images", "image_url"})  # keys of pictures in lists of inputs

# -- values ------------------------------------------------------------------------------------------------------------


def whole(value: Any) -> Any:
    """Return an integer for a float without fraction, as some programs send."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def texts_of(value: Any, most: int = TEXTS_AT_ONCE) -> Any:
    """Return texts as a list; raises ValueError with the reason."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not 0 < len(items) <= most:
        raise ValueError(f"send a text or a list of 1 to {most} texts")
    for place, one in enumerate(items):
        if isinstance(one, int | float | list) and not isinstance(one, bool):
            raise ValueError(  # noqa: TRY004  # pydantic takes no other
                "token ids belong to another tokenizer: send texts (LangChain: OpenAIEmbeddings(..., "
                "check_embedding_ctx_length=False))"
            )
        if isinstance(one, dict) and not _PICTURES.isdisjoint(one):
            raise ValueError(
                f"element {place} is a picture, and this route reads texts; send a picture to POST /infer as "
                '{"model", "image"}, with the image in base64'
            )
        if not isinstance(one, str):
            raise ValueError(f"element {place} is {shown(one)}; send texts")  # noqa: TRY004
    return items


def texts_field(most: int) -> Any:
    """Return the description of what `texts_of` reads."""
    schema: dict[str, Any] = {"type": ["string", "array"], "minItems": 1, "maxItems": most}
    return Field(description=f"a text or a list of 1 to {most} texts", json_schema_extra=schema)


#: at least 1; the bound comes before the validator, or JSON Schema loses it
Count = Annotated[int, Field(ge=1), BeforeValidator(whole)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Texts = Annotated[list[str], BeforeValidator(texts_of), texts_field(TEXTS_AT_ONCE)]
TextList = Annotated[list[str], Field(min_length=1, max_length=TEXTS_AT_ONCE)]


def _no_address(picture: str) -> str:
    if picture.startswith(("http://", "https://")):
        raise ValueError("Hepti fetches nothing: send the picture itself in base64, not its address")
    return picture


Picture = Annotated[str, AfterValidator(_no_address), Field(description="a picture in base64, not its address")]


def shown(value: Any) -> str:
    """Return the beginning of a value, for an error."""
    if isinstance(value, dict | list):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return "a file" if isinstance(value, bytes) else repr(value)[:_SHOWN]


def seed(value: int) -> int:
    """Return a seed of any size as one of 32 bits."""
    return value % 2**32


class Key:
    """A client's name of an option; convert: its value to MQTT's, None for no option; free: bounds that it lifts."""

    def __init__(
        self, option: Option, convert: Callable[[Any], Any] = lambda value: value, free: tuple[str, ...] = ()
    ) -> None:
        self.option, self._convert, self._free = option, convert, free

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the client's values."""
        return {key: value for key, value in self.option.schema().items() if key not in self._free}

    def read(self, name: str, value: Any) -> Any:
        """Return MQTT's value; raises RequestError with the client's name."""
        value = whole(value) if self.option.kind == "integer" else value
        if self.option.kind == "integer" and (not isinstance(value, int) or isinstance(value, bool)):
            self.option.check(value, name)
        converted = self._convert(value)
        if converted is None or converted in self.option.neutral:
            return None
        self.option.check(converted, name)
        return converted


# -- models ------------------------------------------------------------------------------------------------------------


class Body(BaseModel):
    """A body: a key that is not understood may change the answer, so it is refused; null is no value."""

    model_config = ConfigDict(strict=True)
    #: options of a request, by the client's name
    keys: ClassVar[Mapping[str, Key]] = {}
    #: accepted and ignored
    ignored: ClassVar[frozenset[str]] = frozenset()
    #: unsupported keys, with the values that are accepted because they change nothing; so are empty values
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    _chosen: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def chosen(self) -> dict[str, Any]:
        """Return MQTT's options that the body's `keys` name."""
        return self._chosen

    def names(self) -> dict[str, str]:
        """Return the client's names of the options that were chosen, by MQTT's, also of bodies within."""
        names = {key.option.name: name for name, key in self.keys.items() if key.option.name in self._chosen}
        for value in self.__dict__.values():
            names |= value.names() if isinstance(value, Body) else {}
        return names

    @model_validator(mode="wrap")
    @classmethod
    def _split(cls, values: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, Mapping):
            return read(values)
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if unknown := [key for key in values if not (key in fields or key in cls.others())]:
            some = ", ".join(repr(key[:_SHOWN]) for key in unknown[:8])
            raise RequestError(f"the body has keys that are not supported: {some}; leave them out", unknown[0])
        kept, chosen = dict[str, Any](), dict[str, Any]()
        for name, value in values.items():
            if name in cls.keys:
                option = None if value is None else cls.keys[name].read(name, value)
                chosen |= {} if option is None else {cls.keys[name].option.name: option}
            elif name in cls.neutral:
                _check_neutral(name, value, cls.neutral[name])
            elif name in fields and (value is not None or fields[name].is_required()):
                kept[name] = value
        body = read(kept)
        body._chosen = chosen
        return body

    @classmethod
    def others(cls) -> dict[str, dict[str, Any]]:
        """Return the JSON schemas of keys that are no fields."""
        empty: dict[str, dict[str, Any]] = {
            name: {"enum": [*_EMPTY, *values], "description": "not supported; values that change nothing are accepted"}
            for name, values in cls.neutral.items()
        }
        ignored = {name: {"description": "ignored: it changes nothing of the answer"} for name in cls.ignored}
        return {name: key.schema() for name, key in cls.keys.items()} | empty | ignored

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        null, fields = {"type": "null"}, schema.get("properties", {})
        for name in fields.keys() - schema.get("required", ()):  # null is no option
            if null not in fields[name].get("anyOf", ()):
                fields[name] = {"anyOf": [fields[name], null]}
        schema["properties"] = fields | cls.others()
        return schema | {"additionalProperties": False}


def _check_neutral(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise RequestError for a value that would change the answer."""
    if not any(value == one and type(value) is type(one) for one in (*_EMPTY, *allowed)):
        raise RequestError(f"{name!r} is {shown(value)}, which is not supported; leave it out", name)


AnyBody = TypeVar("AnyBody", bound=Body)


def checked(model: type[AnyBody], values: Any) -> AnyBody:
    """Return a body; values: JSON as bytes, or the fields of a form. Raises RequestError, with the key at fault."""
    try:
        return model.model_validate_json(values) if isinstance(values, bytes) else model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        raise RequestError(f"the body is not JSON: {first['msg']}")
    if not first["loc"]:
        raise RequestError("the body is not a JSON object")
    name = str(first["loc"][0])
    fields = {field.alias or key: field for key, field in model.model_fields.items()}
    wanted = (fields[name].description if name in fields else "") or ""
    if first["type"] == "missing" and len(first["loc"]) == 1:
        raise RequestError(f"the body lacks {name!r}{wanted and f' ({wanted})'}", name)
    why = first["msg"].removeprefix("Value error, ")
    wanted = wanted if wanted and first["type"] != "value_error" else why
    raise RequestError(f"{name!r} is {shown(first['input'])}: {wanted}", name)


# -- reading -----------------------------------------------------------------------------------------------------------


class Room:
    """The memory of the bodies of all running requests."""

    def __init__(self) -> None:
        self._left = ROOM_BYTES

    @contextlib.contextmanager
    def part(self) -> Iterator[Callable[[int], None]]:
        """Give what takes bytes until the end of the block; it raises OverloadedError if too few are left."""
        taken = 0

        def take(nbytes: int) -> None:
            nonlocal taken
            if nbytes > self._left:
                raise OverloadedError("the bodies of other requests fill the gateway's memory; try again later")
            self._left -= nbytes
            taken += nbytes

        try:
            yield take
        finally:
            self._left += taken


def media_type(request: Request) -> str:
    """Return the media type of the body, "" if it has none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


class _FormParser(MultiPartParser):
    """Keeps files in memory, which `take` has counted, and knows whether the form came whole."""

    spool_max_size = MAX_BODY_BYTES
    is_whole = False

    def on_end(self) -> None:
        """Note the last boundary."""
        self.is_whole = True


async def read_form(request: Request, take: Callable[[int], None]) -> dict[str, Any]:
    """Return the fields of a form: texts, and files as their bytes; raises as `read_json` does.

    Empty texts are left out.
    """
    if media_type(request) != FORM:
        raise HttpError("media_type", f"the body is no form; send the file as {FORM}")
    limits = {"max_files": MAX_FIELDS, "max_fields": MAX_FIELDS, "max_part_size": MAX_BODY_BYTES}
    parser = _FormParser(Headers(scope=request.scope), _stream(request, take), **limits)
    values: dict[str, Any] = {}
    try:
        form = await parser.parse()
        if not parser.is_whole:
            raise RequestError(f"the form is not complete; send the file as {FORM}")
        for name, field in form.multi_items():
            value = await field.read() if isinstance(field, UploadFile) else field
            if name in values and not name.endswith("[]"):
                raise RequestError(f"the form has two fields {name[:_SHOWN]!r}; send one", name)
            if value != "":
                values[name] = [*values.get(name, ()), value] if name.endswith("[]") else value
    except (MultiPartException, FormParserError) as error:
        raise RequestError(f"the form cannot be read ({error}); send the file as {FORM}") from None
    finally:
        for file in parser._files_to_close_on_error:  # of every form that does not come whole
            file.close()
    return values


async def read_json(request: Request, take: Callable[[int], None]) -> bytes:
    """Return the JSON of a request; a body without Content-Type is JSON.

    take: room for its bytes. Raises HttpError, OverloadedError, RequestError;
    ClientDisconnect if the client hangs up.
    """
    kind = media_type(request)
    if kind not in ("", "application/json") and not kind.endswith("+json"):
        raise HttpError("media_type", f"the body is {kind}; send JSON with Content-Type: application/json")
    return b"".join([part async for part in _stream(request, take)])


async def _stream(request: Request, take: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
    """Yield the body's parts, unpacked if they are gzip; raises as `read_json` does."""
    too_large = HttpError("too_large", f"the body is longer than {MAX_BODY_BYTES >> 20} MiB; send fewer inputs at once")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip"):
        raise HttpError("media_type", f"Content-Encoding is {coding[:_SHOWN]}; send the body as it is, or as gzip")
    unpacker = zlib.decompressobj(wbits=31) if coding == "gzip" else None
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data = part if unpacker is None else unpacker.decompress(part, MAX_BODY_BYTES + 1 - size)
                size += len(data)
                if size > MAX_BODY_BYTES:
                    raise too_large
                take(len(data))
                yield data
    except TimeoutError:
        raise HttpError("slow_body", f"the body did not arrive within {BODY_S:g} s") from None
    except zlib.error as error:
        raise RequestError(f"the body is not gzip ({error})") from None
    if unpacker is not None and not unpacker.eof:
        raise RequestError("the gzip of the body is not complete")
