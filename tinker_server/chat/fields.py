"""Nested fields of chat requests: each reaches the prompt or the answer, changes nothing, or is refused by its path.

vLLM passes over fields that it does not know. A field that is null counts as absent.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

from tinker_server.backends.protocol import ChatEndpoint
from tinker_server.chat.bounds import quote
from tinker_server.errors import BadField

ANY = object()
"""Any value."""


@dataclass(frozen=True)
class Shape:
    """The fields of an object."""

    fields: Mapping[str, Union["Shape", "Kinds", None]]
    """Fields with an effect, and the shape of each, or of the objects in it. None if others check all that it holds."""
    without_effect: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Fields that change nothing, with the values for which that is true. docs/chat.md has them for clients."""


@dataclass(frozen=True)
class Kinds:
    """An object whose shape depends on a field."""

    key: str
    shapes: Mapping[str, Shape]
    default: Shape | None = None
    """The shape of every other kind."""
    inferred: str | None = None
    """The kind of an object without the key."""


def _shape(
    names: str, without_effect: Mapping[str, tuple[object, ...]] | None = None, **nested: Shape | Kinds
) -> Shape:
    return Shape({**dict.fromkeys(names.split()), **nested}, without_effect or {})


_CACHED: dict[str, tuple[object, ...]] = {"cache_control": (ANY,), "prompt_cache_breakpoint": (ANY,)}
"""The prefix cache needs no marks. Gateways send Anthropic's to OpenAI's paths too."""
_DETAIL: dict[str, tuple[object, ...]] = {"detail": ("auto", "high", "original")}
"""`low` asks for a smaller image, which vLLM does not make."""

_TEXT = _shape("type text", _CACHED)
_IMAGE_URL = _shape("type", _CACHED, image_url=_shape("url", _DETAIL))
_PARTS = Kinds(
    "type",
    {
        "text": _TEXT,
        "image_url": _IMAGE_URL,
        "input_text": _TEXT,
        "output_text": _TEXT,
        "refusal": _shape("type refusal"),
        "thinking": _shape("type thinking"),
    },
    inferred="text",
)
_CALL = _shape(
    "id type",
    {"index": (ANY,)} | _CACHED,  # an index is what a stream's deltas leave behind
    function=_shape("name arguments", {"parsed_arguments": (ANY,)}),
)
_ASSISTANT = _shape(
    "role name reasoning reasoning_content",
    {
        "refusal": ("",),
        "annotations": ([],),
        "parsed": (ANY,),  # the content again, as openai's `parse` returns it
        "provider_specific_fields": (ANY,),  # LiteLLM's notes on an answer
    }
    | _CACHED,
    content=_PARTS,
    tool_calls=Kinds("type", {"function": _CALL}, inferred="function"),
)
_SAID = _shape("role name", _CACHED, content=_PARTS)
_FUNCTION = _shape("name description parameters strict", {"defer_loading": (False,)} | _CACHED)
_CHAT = _shape(
    "",
    messages=Kinds(
        "role",
        {"assistant": _ASSISTANT, "tool": _shape("role name tool_call_id", _CACHED, content=_PARTS)},
        default=_SAID,
    ),
    tools=Kinds("type", {"function": _shape("type", _CACHED, function=_FUNCTION)}, inferred="function"),
    tool_choice=Kinds("type", {"function": _shape("type", function=_shape("name"))}, inferred="function"),
    stream_options=_shape("include_usage continuous_usage_stats", {"include_obfuscation": (False,)}),
)

_IMAGE = _shape(
    "type",
    _CACHED,
    source=Kinds("type", {"base64": _shape("type media_type data"), "url": _shape("type url")}),
)
_BLOCKS = {"text": _shape("type text", {"citations": ([],)} | _CACHED), "image": _IMAGE}
_TOOL_USE = _shape("type id name input", {"caller": ({"type": "direct"},)} | _CACHED)
_TOOL_RESULT = _shape("type tool_use_id", {"is_error": (True, False)} | _CACHED, content=Kinds("type", _BLOCKS))
"""Templates have no form for `is_error`; the client's text says what failed."""
_THINKING = _shape("type thinking", {"signature": (ANY,)})
_FUNCTION_TOOL = _shape(
    "type name description input_schema strict",
    {
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "eager_input_streaming": (True, False),
        "input_examples": ([],),
    }
    | _CACHED,
)
_CHOICE = _shape("type disable_parallel_tool_use")
_ANTHROPIC = _shape(
    "",
    system=Kinds("type", {"text": _BLOCKS["text"]}),
    messages=Kinds(
        "role",
        {
            "user": _shape("role", content=Kinds("type", {**_BLOCKS, "tool_result": _TOOL_RESULT})),
            "assistant": _shape(
                "role", content=Kinds("type", {**_BLOCKS, "tool_use": _TOOL_USE, "thinking": _THINKING})
            ),
            "system": _shape("role", content=Kinds("type", {"text": _BLOCKS["text"]})),
        },
    ),
    tools=Kinds("type", {"custom": _FUNCTION_TOOL}, inferred="custom"),
    tool_choice=Kinds(
        "type",
        {"auto": _CHOICE, "any": _CHOICE, "none": _CHOICE, "tool": _shape("type name disable_parallel_tool_use")},
    ),
)

_NOTES: dict[str, tuple[object, ...]] = {"id": (ANY,), "status": (ANY,)}
"""Fields of earlier items, which answers have and nothing stores."""
_ITEM_TEXT = _shape("type text", {"annotations": ([],), "logprobs": ([],), "parsed": (ANY,)} | _CACHED)
_ITEM_PARTS = Kinds(
    "type",
    {
        "input_text": _ITEM_TEXT,
        "output_text": _ITEM_TEXT,
        "input_image": _shape("type image_url", _DETAIL | _CACHED),
    },
)
RESPONSES = _shape(
    "",
    input=Kinds(
        "type",
        {
            "message": _shape("type role", _NOTES, content=_ITEM_PARTS),
            "function_call": _shape("type call_id name arguments", {"parsed_arguments": (ANY,)} | _NOTES),
            "function_call_output": _shape("type call_id", _NOTES, output=_ITEM_PARTS),
        },
        inferred="message",
    ),
    tools=Kinds("type", {"function": _shape("type name description parameters strict", {"defer_loading": (False,)})}),
    tool_choice=Kinds("type", {"function": _shape("type name")}),
)
SHAPES: Mapping[ChatEndpoint, Shape] = {
    "chat_completions": _CHAT,
    "completions": _shape("", stream_options=_CHAT.fields["stream_options"]),  # type: ignore[arg-type]
    "messages": _ANTHROPIC,
    "count_tokens": _ANTHROPIC,
}


def require_known(body: Mapping[str, object], shape: Shape) -> None:
    """Raise BadField for a nested field without a place here. The body's own fields are checked elsewhere."""
    for name, nested in shape.fields.items():
        if nested is not None:
            _require(body.get(name), nested, name)


def is_moot(value: object, values: tuple[object, ...]) -> bool:
    """Return whether the value is among those that change nothing."""
    return any(allowed is ANY or (type(allowed) is type(value) and allowed == value) for allowed in values)


def _require(value: object, shape: Shape | Kinds, where: str) -> None:
    """Check an object, or the objects of a list. Other values have no fields."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _require(item, shape, f"{where}.{index}")
    elif isinstance(value, dict):
        _require_fields(value, shape if isinstance(shape, Shape) else _chosen(value, shape, where), where)


def _chosen(value: dict[str, object], kinds: Kinds, where: str) -> Shape:
    kind = value.get(kinds.key)
    if kind is None and kinds.inferred is not None:
        kind = "image_url" if "image_url" in kinds.shapes and "image_url" in value else kinds.inferred
    found = kinds.shapes.get(kind, kinds.default) if isinstance(kind, str) else None
    if found is None:
        said = "missing" if kind is None else quote(kind)
        raise BadField(f"{where}.{kinds.key} is {said}; supported are {', '.join(kinds.shapes)}", _root(where))
    return found


def _require_fields(value: dict[str, object], shape: Shape, where: str) -> None:
    for name, item in value.items():
        if item is None:
            continue
        if name in shape.fields:
            if (nested := shape.fields[name]) is not None:
                _require(item, nested, f"{where}.{name}")
        elif (moot := shape.without_effect.get(name)) is None:
            allowed = ", ".join(sorted(shape.fields))
            raise BadField(f"{where}.{quote(name)} is not supported; supported are {allowed}", _root(where))
        elif not is_moot(item, moot):
            allowed = " or ".join(map(json.dumps, moot))
            raise BadField(f"{where}.{name} is {quote(item)}; supported is {allowed}", _root(where))


def _root(where: str) -> str:
    return where.partition(".")[0]
