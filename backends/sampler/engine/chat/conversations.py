"""vLLM's handler of conversations, where it says less than a vendor does.

1. A request of Anthropic's form that ends with an assistant message is continued. vLLM would close this message and
   open the next.
2. With tools, a whole answer is what its stream adds up to. vLLM parses each in its own way: a call that is cut at
   `max_tokens` would be a call in the one and text in the other.
"""

import json
from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import from_json
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessage,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages, _is_json, _to_anthropic_stop_reason
from vllm.entrypoints.generate.base.protocol import StreamOptions
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from tinker_server.backends.protocol import InvalidInput

_EVENT, _LAST = "data: ", "data: [DONE]"


class Conversations(AnthropicServingMessages):  # type: ignore[misc]
    """Answers requests of both vendors' forms."""

    @classmethod
    def to_chat_completion_request(
        cls, anthropic_request: AnthropicMessagesRequest | AnthropicCountTokensRequest, **settings: Any
    ) -> ChatCompletionRequest:
        """Return the request in OpenAI's form. Raises InvalidInput for a last message that cannot be continued."""
        *before, last = anthropic_request.messages or [None]
        if last is None or last.role != "assistant":
            return super().to_chat_completion_request(anthropic_request, **settings)
        text = _text_to_continue(last, len(before))
        continued = [last.model_copy(update={"content": text})] if text else []
        own = anthropic_request.model_copy(update={"messages": [*before, *continued]})
        request: ChatCompletionRequest = super().to_chat_completion_request(own, **settings)
        request.continue_final_message, request.add_generation_prompt = bool(text), not text
        return request

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """Return the events of an answer, or all of it."""
        if request.stream or not request.tools or request.tool_choice == "none":
            return await super().create_chat_completion(request, raw_request)
        streamed = {"stream": True, "stream_options": StreamOptions(include_usage=True)}
        events = await super().create_chat_completion(request.model_copy(update=streamed), raw_request)
        return events if isinstance(events, ErrorResponse) else await _join(events)

    def messages_full_converter(self, generator: ChatCompletionResponse) -> AnthropicMessagesResponse:
        """Return an answer in Anthropic's form. Of a call that was cut, the input is what it has of its arguments, as
        in Anthropic's own clients of a stream."""
        [choice] = generator.choices
        calls = choice.message.tool_calls
        is_complete = bool(calls) and _is_json(calls[-1].function.arguments)
        for call in calls:
            call.function.arguments = json.dumps(_partial(call.function.arguments))
        answer: AnthropicMessagesResponse = super().messages_full_converter(generator)
        answer.stop_reason, answer.stop_sequence = _to_anthropic_stop_reason(
            choice.finish_reason, choice.stop_reason, tool_used=bool(calls), tool_complete=is_complete
        )
        return answer


def _text_to_continue(message: AnthropicMessage, index: int) -> str:
    """Return the text of an assistant message that ends a conversation. Raises InvalidInput."""
    where = f"messages.{index}"
    if isinstance(message.content, str):
        text = message.content
    else:
        for at, block in enumerate(message.content):
            if block.type != "text":
                raise InvalidInput(
                    f"{where}.content.{at}: the last message is the assistant's, so the answer continues it; it may"
                    f" have text alone, not {block.type}"
                )
        text = "".join(block.text or "" for block in message.content)
    if text != text.rstrip():
        raise InvalidInput(f"{where}: the last message is the assistant's, so it must not end with white space")
    return text


def _partial(arguments: str) -> dict[str, Any]:
    """Return the object whose beginning is `arguments`."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _join(events: AsyncGenerator[str, None]) -> ChatCompletionResponse:
    """Return the answer that the events of a stream add up to. Raises RuntimeError for an error in them."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    async for event in events:
        if not event.startswith(_EVENT) or event.startswith(_LAST):
            continue
        chunk = json.loads(event.removeprefix(_EVENT))
        if "error" in chunk:
            raise RuntimeError(chunk["error"]["message"])
        deltas = chunk.pop("choices")
        chunk.pop("object")
        whole |= {name: value for name, value in chunk.items() if value is not None}
        for delta in deltas:
            _add(choices.setdefault(delta["index"], {"index": delta["index"], "message": {}}), delta)
    for choice in choices.values():
        message = choice["message"]
        message["tool_calls"] = [message["tool_calls"][at] for at in sorted(message.get("tool_calls", {}))]
        message["content"] = message.get("content") or (None if message["tool_calls"] else "")
    return ChatCompletionResponse(choices=[choices[index] for index in sorted(choices)], **whole)


def _add(choice: dict[str, Any], event: dict[str, Any]) -> None:
    """Add an event of a choice to it."""
    message, delta = choice["message"], event["delta"]
    message.setdefault("role", delta.get("role") or "assistant")
    for field in ("content", "reasoning"):
        if delta.get(field):
            message[field] = message.get(field, "") + delta[field]
    for part in delta.get("tool_calls") or ():
        call = message.setdefault("tool_calls", {}).setdefault(
            part["index"], {"function": {"name": "", "arguments": ""}}
        )
        call |= {"id": part["id"]} if part.get("id") else {}
        for field, text in (part.get("function") or {}).items():
            call["function"][field] += text or ""
    for field in ("finish_reason", "stop_reason"):
        if event.get(field) is not None:
            choice[field] = event[field]
    if event.get("token_ids") is not None:
        choice["token_ids"] = choice.get("token_ids", []) + event["token_ids"]
    if (logprobs := event.get("logprobs")) and logprobs.get("content"):
        choice.setdefault("logprobs", {"content": []})["content"] += logprobs["content"]
