"""Messages to the text that a chat model continues, by the Jinja template of its files; needs the extra `chat`.

The template is a program of the checkpoint's, so it runs in Jinja's sandbox and within limits. Source: transformers,
`apply_chat_template`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer

from hepti_mqtt.core.errors import HeptiError, ModelError, RequestError
from hepti_mqtt.models.views import expanded

if TYPE_CHECKING:
    from jinja2 import Template

FILE: Final = "chat_template.jinja"
OLD_FILE: Final = "chat_template.json"
CONFIG: Final = "tokenizer_config.json"
MAX_TEXT: Final = 1_000_000  # characters that a template may write
MAX_ROUNDS: Final = 100_000  # of loops, and calls, in one text
CALL: Final = "<tool_call>\n"  # of Hermes and Qwen
_THOUGHTS: Final = ("</think>", "enable_thinking")  # of Qwen 3, DeepSeek R1 and their successors
_LLAMA: Final = '"parameters": '
_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# They replace special tokens in users' texts, so that only the template's own are recognised.
_OPEN, _CLOSE, _FIRST = "\ue000", "\ue001", 0xE100


class ChatTemplate:
    """Turns messages into token ids; raises ModelError for a template that is broken or writes without end.

    call_start: ids that begin a tool call; call_arguments: the key of a call's arguments. thinks: the model writes
    thoughts before its answer.
    """

    def __init__(self, source: str, tools_source: str, tokenizer: Tokenizer, named: Mapping[str, str]) -> None:
        """tools_source: of the template for requests with tools. named: special tokens by their role."""
        self._template, self._tools_template = _compiled(source), _compiled(tools_source)
        self._named = dict(named)
        self._texts = tokenizer  # reads special tokens as text
        self._marked = Tokenizer.from_str(tokenizer.to_str())
        self._marked.encode_special_tokens = False
        tokens = tokenizer.get_added_tokens_decoder().items()
        self._special = {token.content: i for i, token in tokens if token.special and token.content}
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first) or r"(?!)")
        self.call_start = (
            list(self._marked.encode(CALL, add_special_tokens=False).ids) if CALL.strip() in tools_source else []
        )
        self.call_arguments = "parameters" if _LLAMA in tools_source else "arguments"
        self.thinks = any(mark in source for mark in _THOUGHTS)

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool | None = None,
        pictures: tuple[str, Sequence[str]] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation up to the beginning of the next answer.

        What users wrote is never read as a special token. thinking: whether the template asks for thoughts, None for
        its own choice. pictures: what the template writes for a picture, and what the model reads instead of each.
        Raises RequestError if the template writes other numbers of pictures.
        """
        spelt = _each_text([messages, tools], lambda text: self._pattern.search(text) is not None or _OPEN in text)
        hidden = _mapped([messages, tools], self._hide) if spelt else [messages, tools]
        text = self._written(hidden[0], hidden[1], {} if thinking is None else {"enable_thinking": thinking})
        if pictures is not None:
            mark, written = pictures
            if (whole := expanded(text, mark, written)) is None:
                raise RequestError(
                    f"the model's chat template writes {text.count(mark)} of {len(written)} pictures; put them into "
                    "messages of users"
                )
            text = whole
        if not spelt:
            return list(self._marked.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        at = 0
        for match in self._pattern.finditer(text):
            ids += self._plain(text[at : match.start()])
            ids.append(self._special[match[0]])
            at = match.end()
        return ids + self._plain(text[at:])

    def _plain(self, text: str) -> list[int]:
        shown = re.sub(f"{_OPEN}(.){_CLOSE}", self._show, text)
        return list(self._texts.encode(shown, add_special_tokens=False).ids) if shown else []

    def _hide(self, text: str) -> str:
        names = [_OPEN, *self._special]
        return re.sub(
            f"{_OPEN}|{self._pattern.pattern}",
            lambda match: f"{_OPEN}{chr(_FIRST + names.index(match[0]))}{_CLOSE}",
            text,
        )

    def _show(self, match: re.Match[str]) -> str:
        return [_OPEN, *self._special][ord(match[1]) - _FIRST]

    def _written(self, messages: Any, tools: Any, options: Mapping[str, Any]) -> str:
        template = self._tools_template if tools else self._template
        values = {
            **options,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        parts: list[str] = []
        size = 0
        _rounds.set(0)
        try:
            for part in template.generate(**self._named, **values):
                parts.append(part)
                size += len(part)
                if size > MAX_TEXT:
                    raise ModelError(f"the chat template writes more than {MAX_TEXT} characters; shorten the messages")
        except _RefusedError as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}") from None
        except HeptiError:
            raise
        except Exception as error:  # the template is a program, which may raise anything
            raise ModelError(
                f"the model's chat template fails ({type(error).__name__}: {str(error)[:200]}); send other messages, "
                "or the text itself"
            ) from error
        return "".join(parts)


class _RefusedError(Exception):
    """The template itself refuses the messages."""


_rounds: Final[ContextVar[int]] = ContextVar("rounds")  # of the text that this thread writes


def _count_round() -> None:
    _rounds.set(_rounds.get() + 1)
    if _rounds.get() > MAX_ROUNDS:
        raise ValueError(f"its loops and calls have more than {MAX_ROUNDS} rounds")


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values; count a round of a loop for each."""
    for value in values:
        _count_round()
        yield value


def open_template(path: Path, extras: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template of a directory, None without one.

    Raises ModelError for a bad one, and without the extra.
    """
    options: Mapping[str, Any] = extras.get(CONFIG, {})
    source = options.get("chat_template")
    if OLD_FILE in extras:
        source = extras[OLD_FILE].get("chat_template")
    if (path / FILE).is_file():
        source = (path / FILE).read_text("utf-8", "replace")
    if source is None:
        return None
    sources = {"default": source}
    if isinstance(source, list):
        sources = {str(one.get("name")): one.get("template") for one in source if isinstance(one, Mapping)}
    default = sources.get("default")
    with_tools = sources.get("tool_use", default)
    if not isinstance(default, str) or not isinstance(with_tools, str):
        raise ModelError(f"{path}: chat_template is neither a text nor a list with an entry named default")
    named = {role: options[role] for role in _TOKENS if options.get(role) is not None}
    texts = {role: token["content"] if isinstance(token, Mapping) else token for role, token in named.items()}
    try:
        return ChatTemplate(default, with_tools, tokenizer, texts)
    except ImportError as error:
        raise ModelError(
            f"{path} has a chat template, which needs {error.name}: in the checkout, pip install '.[chat]'"
        ) from error


def _compiled(source: str) -> Template:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads `{% generation %}`, which marks a model's own text for training."""

        tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        """Refuses products that would fill the memory, and counts rounds of loops and calls."""

        intercepted_binops = frozenset({"*", "**"})
        counted = staticmethod(_counted)

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [loop.iter], [], None, None)
            return tree

        def call(self, context: Any, function: Any, /, *values: Any, **named: Any) -> Any:
            _count_round()
            if isinstance(function, LoopContext):  # the next level of a recursive loop
                values = (_counted(values[0]), *values[1:])
            return super().call(context, function, *values, **named)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(one) for one in (left, right) if isinstance(one, Sized)]
            counts = [abs(one) for one in (left, right) if isinstance(one, int)]
            too_many = operator == "**" and max(counts, default=0) > MAX_ROUNDS
            if too_many or (sizes and math.prod(sizes + counts) > MAX_TEXT):
                raise OverflowError(f"{operator} makes a value that is too large")
            return super().call_binop(context, operator, left, right)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = time.strftime
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise ModelError(f"the model's chat template is not valid ({error}); restore it") from error


def _to_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(why: object) -> None:
    raise _RefusedError(str(why)[:200])


def _each_text(value: Any, holds: Any) -> bool:
    if isinstance(value, str):
        return bool(holds(value))
    if isinstance(value, Mapping):
        return any(_each_text(one, holds) for pair in value.items() for one in pair)
    return isinstance(value, Sequence) and any(_each_text(one, holds) for one in value)


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(one, change) for key, one in value.items()}
    return [_mapped(one, change) for one in value] if isinstance(value, list | tuple) else value
