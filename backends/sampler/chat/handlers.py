"""Answers of the chat endpoints: vLLM's own handlers make them, one copy of a handler for each request."""

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.parser import ParserManager
from vllm.renderers.hf import resolve_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.async_llm import AsyncLLM

from backends.families.tool_calls import tool_parser
from backends.protocol import BackendFailed, ChatEndpoint, ChatTask, ChatUsage, InvalidInput
from backends.sampler.chat.engine_client import ChatEngine, Room
from backends.sampler.chat.prompts import chat_renderer
from backends.sampler.chat.requests import parsed

log = logging.getLogger(__name__)
_CALLS: dict[ChatEndpoint, Callable[[Any, Any], Awaitable[Any]]] = {
    "chat_completions": OpenAIServingChat.create_chat_completion,
    "completions": OpenAIServingCompletion.create_completion,
    "messages": AnthropicServingMessages.create_messages,
    "count_tokens": AnthropicServingMessages.count_tokens,
}


class _Names:
    """What a handler asks of its models: the server has looked the name up already."""

    lora_requests: dict[str, Any] = {}
    base_model_paths: list[Any] = []

    def __init__(self, name: str) -> None:
        self._name = name

    def is_base_model(self, name: str) -> bool:
        return True

    def model_name(self, _: object = None) -> str:
        return self._name


class Chats:
    """The handlers of one engine."""

    def __init__(self, engine: AsyncLLM, room: Room) -> None:
        self._room = room
        renderer = chat_renderer(engine.renderer, room.renderer)
        self._tool_parser = _working_parser(engine)
        tools = {"enable_auto_tools": self._tool_parser is not None, "tool_parser": self._tool_parser}
        # A guess of vLLM's that is wrong puts all images before all text, and nothing complains.
        form = "openai" if room.renderer.takes_images else "auto"
        template = {"chat_template": None, "chat_template_content_format": form, **tools}
        online = OnlineRenderer(engine.model_config, renderer, request_logger=None, **template)
        shared = {"online_renderer": online, "request_logger": None, "enable_prompt_tokens_details": True}
        names = _Names("")
        completion = OpenAIServingCompletion(engine, names, **shared)
        messages = AnthropicServingMessages(engine, names, "assistant", **shared, **template)
        conversation = OpenAIServingChat(engine, names, "assistant", **shared, **template)
        for handler in (completion, messages, conversation):
            # Temperature 1 unless asked otherwise, so that log probabilities are the model's own; a model's
            # generation config may cut its distribution.
            handler.default_sampling_params = {}
        self._handlers: dict[ChatEndpoint, Any] = {
            "chat_completions": conversation,
            "completions": completion,
            "messages": messages,
            "count_tokens": messages,
        }

    async def answer(self, task: ChatTask, tell: Callable[[str], None]) -> ChatUsage:
        """`protocol.Sampler.chat`."""
        async with self._room.weights.hold(task.weights) as held:
            engine = ChatEngine(self._room, task, held)
            try:
                await self._tell(task, engine, tell)
            except (InvalidInput, BackendFailed):
                raise
            except Exception as error:
                raise engine.failure or _refusal(create_error_response(error), error) from error
            return replace(engine.usage, drawn=engine.drawn())

    async def _tell(self, task: ChatTask, engine: ChatEngine, tell: Callable[[str], None]) -> None:
        if task.body.get("tools") and self._tool_parser is None:
            raise InvalidInput("tools: the model's chat template teaches it no calls that this server can read")
        handler = copy.copy(self._handlers[task.endpoint])
        handler.engine_client, handler.models = engine, _Names(task.body["model"])
        request = await asyncio.to_thread(parsed, task)  # of thousands of messages it takes a second
        answer = await _CALLS[task.endpoint](handler, request)
        if isinstance(answer, ErrorResponse):
            raise engine.failure or _refusal(answer)
        if not isinstance(answer, AsyncGenerator):
            tell(answer.model_dump_json(exclude_none=task.endpoint in ("messages", "count_tokens")))
            return
        async with aclosing(answer) as events:
            async for event in events:
                if engine.failure is not None:  # the handler makes an event of it, in words of its own
                    raise engine.failure
                tell(event)


def _refusal(answer: ErrorResponse, cause: Exception | None = None) -> InvalidInput | BackendFailed:
    """What vLLM says of a request that it does not answer."""
    if answer.error.code < 500:
        named = f"{answer.error.param}: " if answer.error.param else ""
        return InvalidInput(f"{named}{answer.error.message}")
    log.error("a chat failed unexpectedly: %s", answer.error.message, exc_info=cause)
    return BackendFailed(f"the chat failed unexpectedly ({type(cause).__name__}); the server's log has the details")


def _working_parser(engine: AsyncLLM) -> str | None:
    """What reads the model's calls of tools, where its tokenizer has what that needs."""
    tokenizer = engine.renderer.tokenizer
    name = tool_parser(resolve_chat_template(tokenizer, None, [], model_config=engine.model_config))
    if name is None:
        return None
    try:
        ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, tokenizer=tokenizer)
    except TypeError as error:
        log.warning("calls of tools are not read: %s", error)
        return None
    return name
