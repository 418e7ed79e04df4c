"""OpenAI's Responses as a translation to and from chat completions. Nothing is stored, so every request has its whole
conversation."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tinker_server.chat.bounds import quote, require_echoed
from tinker_server.chat.fields import RESPONSES, require_known
from tinker_server.chat.messages import text_of
from tinker_server.errors import BadField

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user")
"""Fields that chat completions have under the same name."""
FIELDS = (*SAME, "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning")
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "include": ([], ["reasoning.encrypted_content"]),
    "top_logprobs": (0,),
}
"""Fields that change nothing here, with the values for which that is true."""
LABELS = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
"""Fields that change nothing here, whatever their value."""
ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "temperature",
    "top_p",
    "tools",
    "tool_choice",
    "text",
    "reasoning",
)
ITEMS = ("message", "function_call", "function_call_output")
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request as a chat completion's. Raises BadField, naming what is not supported."""
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name in WITHOUT_EFFECT and value not in WITHOUT_EFFECT[name]:
            allowed = " or ".join(map(json.dumps, WITHOUT_EFFECT[name]))
            raise BadField(f"{name} is {quote(value)}; supported is {allowed}", name)
        if name not in (*FIELDS, *WITHOUT_EFFECT, *LABELS):
            raise BadField(f"{name} is not supported; supported are {', '.join(sorted(FIELDS))}", name)
    require_known(body, RESPONSES)
    require_echoed(_object(body.get("metadata", {}), "metadata"), "metadata")
    chat = {name: body[name] for name in SAME if name in body}
    said = _text(body.get("instructions", ""), "instructions")
    chat["messages"] = [*([{"role": "system", "content": said}] if said else []), *_messages(body.get("input"))]
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        chat["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(_list(body["tools"], "tools"))]
    if "tool_choice" in body:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    if (form := _response_format(body.get("text"))) is not None:
        chat["response_format"] = form
    if (effort := _effort(body.get("reasoning"))) is not None:
        chat["reasoning_effort"] = effort
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(_list(value, "input")):
        where = f"input.{index}"
        item = _object(item, where)
        match item.get("type") or "message":
            case "message":
                role = _one_of(item.get("role"), ROLES, f"{where}.role")
                messages.append({"role": ROLES[role], "content": _content(item.get("content"), f"{where}.content")})
            case "function_call":
                arguments = text_of(item.get("arguments"), f"{where}.arguments")
                called = {"name": _text(item.get("name"), f"{where}.name"), "arguments": arguments}
                call = {"id": _text(item.get("call_id"), f"{where}.call_id"), "type": "function", "function": called}
                if not messages or messages[-1]["role"] != "assistant":  # else of the turn that the text before is of
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                call_id = _text(item.get("call_id"), f"{where}.call_id")
                content = _content(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case other:
                _one_of(other, ITEMS, f"{where}.type")
    return messages


def _content(value: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    return [_part(part, f"{where}.{index}") for index, part in enumerate(_list(value, where))]


def _part(value: Any, where: str) -> dict[str, Any]:
    part = _object(value, where)
    match part.get("type"):
        case "input_text" | "output_text":
            return {"type": "text", "text": _text(part.get("text"), f"{where}.text")}
        case "input_image" if isinstance(part.get("image_url"), str):
            return {"type": "image_url", "image_url": {"url": part["image_url"]}}
        case "input_image":
            raise BadField(f"{where}: an image is an image_url; files are not supported", "input")
    _one_of(part.get("type"), ("input_text", "output_text", "input_image"), f"{where}.type")
    raise AssertionError(part)


def _tool(value: Any, where: str) -> dict[str, Any]:
    tool = _object(value, where)
    _one_of(tool.get("type"), ("function",), f"{where}.type")
    return {
        "type": "function",
        "function": {name: field for name, field in tool.items() if name != "type" and field is not None},
    }


def _tool_choice(value: Any) -> Any:
    if isinstance(value, str):
        return value
    choice = _object(value, "tool_choice")
    _one_of(choice.get("type"), ("function",), "tool_choice.type")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _effort(value: Any) -> Any:
    """Return the effort of `reasoning`, which chat completions have as a field of its own. There is no summary of a
    reasoning, so only `auto`, which leaves it open, may be asked for."""
    if value is None:
        return None
    reasoning = _object(value, "reasoning")
    _require_known(reasoning, ("effort", "summary"), "reasoning")
    if reasoning.get("summary") is not None:
        _one_of(reasoning["summary"], ("auto",), "reasoning.summary")
    return reasoning.get("effort")


def _response_format(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    text = _object(value, "text")
    _require_known(text, ("format", "verbosity"), "text")
    if text.get("verbosity") not in (None, "medium"):
        raise BadField(f"text.verbosity is {quote(text['verbosity'])}; supported is medium", "text")
    form = _object(text.get("format") or {"type": "text"}, "text.format")
    kind = _one_of(form.get("type"), ("text", "json_object", "json_schema"), "text.format.type")
    if kind != "json_schema":
        _require_known(form, ("type",), "text.format")
    match kind:
        case "json_schema":
            return {
                "type": "json_schema",
                "json_schema": {name: field for name, field in form.items() if name != "type"},
            }
        case "json_object":
            return {"type": "json_object"}
    return None


def _require_known(value: dict[str, Any], allowed: tuple[str, ...], where: str) -> None:
    """Raise BadField for a further field, which would come back unread."""
    for name in value:
        if name not in allowed:
            raise BadField(
                f"{where}.{quote(name)} is not supported; supported are {', '.join(allowed)}", where.partition(".")[0]
            )


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadField(f"{where} must be {'' if where == 'tools' else 'a text or '}a list", where.partition(".")[0])
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadField(f"{where} must be a text", where.partition(".")[0])
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadField(f"{where} must be an object", where.partition(".")[0])
    return value


def _one_of(value: Any, allowed: Any, where: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise BadField(f"{where} is {quote(value)}; supported are {', '.join(allowed)}", where.partition(".")[0])
    return value


@dataclass
class Translation:
    """An answer, from a chat completion or the events of one to a response or its events."""

    body: dict[str, Any]
    """The request, as it came."""
    response_id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    _output: list[dict[str, Any]] = field(default_factory=list)
    _num_events: int = 0

    def whole(self, content: str) -> str:
        """Return the response for a chat completion."""
        chat = json.loads(content)
        message, ended = chat["choices"][0]["message"], chat["choices"][0]["finish_reason"]
        if message.get("content"):
            self._output.append(_message(message["content"], "completed"))
        for call in message.get("tool_calls") or ():
            self._output.append(_call(call["id"], call["function"]["name"], call["function"]["arguments"], "completed"))
        if ended == "length" and self._output:
            self._output[-1]["status"] = "incomplete"
        return json.dumps(self._end_response(ended, chat.get("usage")))

    async def events(self, parts: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Yield the response's events for those of a chat completion."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        ended, usage, call_index = None, None, None
        async with aclosing(parts):
            async for chunk in _chunks(parts):
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    delta, ended = choice.get("delta") or {}, choice.get("finish_reason") or ended
                    if text := delta.get("content"):
                        for event in self._add_text(text):
                            yield event
                    for call in delta.get("tool_calls") or ():
                        for event in self._add_call(call, is_new=call["index"] != call_index):
                            yield event
                        call_index = call["index"]
        for event in self._item_done("incomplete" if ended == "length" else "completed"):
            yield event
        response = self._end_response(ended, usage)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, refusal: dict[str, Any]) -> str:
        """Return the event that ends a stream that fails: the published fields, and those of a refusal, at which
        OpenAI's clients raise."""
        said = refusal["error"]
        return self._event("error", code=said["code"], message=said["message"], param=said["param"], **refusal)

    def _add_text(self, text: str) -> Iterator[str]:
        if not self._output or self._output[-1]["type"] != "message":
            yield from self._item_done()
            self._output.append(_message("", "in_progress"))
            yield self._item_event("response.output_item.added", item=self._output[-1] | {"content": []})
            part = self._output[-1]["content"][0]
            yield self._item_event("response.content_part.added", content_index=0, part=part)
        self._output[-1]["content"][0]["text"] += text
        yield self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _add_call(self, call: dict[str, Any], *, is_new: bool) -> Iterator[str]:
        function = call.get("function") or {}
        if is_new:
            yield from self._item_done()
            self._output.append(_call(call.get("id"), function.get("name"), "", "in_progress"))
            yield self._item_event("response.output_item.added", item=self._output[-1])
        if arguments := function.get("arguments"):
            self._output[-1]["arguments"] += arguments
            yield self._item_event("response.function_call_arguments.delta", delta=arguments)

    def _item_done(self, status: str = "completed") -> Iterator[str]:
        """Yield the events that end the last item, if any."""
        if not self._output:
            return
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield self._item_event("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            called = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **called)
        yield self._item_event("response.output_item.done", item=item)

    def _item_event(self, kind: str, **fields: Any) -> str:
        place = {"output_index": len(self._output) - 1}
        if "item" not in fields:
            place["item_id"] = self._output[-1]["id"]
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        data = json.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return f"event: {kind}\ndata: {data}\n\n"

    def _end_response(self, reason: str | None, usage: dict[str, Any] | None) -> dict[str, Any]:
        is_cut = reason == "length"
        ended = self._response("incomplete" if is_cut else "completed")
        counted = usage or {}
        details = counted.get("prompt_tokens_details") or {}
        ended["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        ended["usage"] = {
            "input_tokens": counted.get("prompt_tokens", 0),
            "input_tokens_details": {"cached_tokens": details.get("cached_tokens") or 0, "cache_write_tokens": 0},
            "output_tokens": counted.get("completion_tokens", 0),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted.get("total_tokens", 0),
        }
        return ended

    def _response(self, status: str) -> dict[str, Any]:
        defaults = {"tools": [], "tool_choice": "auto", "metadata": {}, "text": {"format": {"type": "text"}}}
        asked = {name: self.body.get(name) for name in ECHOED}
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "model": self.body["model"],
            "status": status,
            "output": self._output,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": self.body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **{name: defaults.get(name) if value is None else value for name, value in asked.items()},
        }


async def _chunks(parts: AsyncGenerator[str, None]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the objects of a stream's events."""
    async for part in parts:
        for line in part.split("\n"):  # other ends of lines, such as U+2028, may stand in the JSON
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _message(text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def _call(call_id: Any, name: Any, arguments: str, status: str) -> dict[str, Any]:
    called = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": status, **called}
