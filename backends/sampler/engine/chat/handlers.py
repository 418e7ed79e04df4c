"""Answers the chat endpoints by vLLM's own handlers, one copy of a handler for each request."""

import asyncio
import copy
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.parser import ParserManager
from vllm.renderers.hf import resolve_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.async_llm import AsyncLLM

from tinker_server.backends.families import gpt_oss
from tinker_server.backends.families.registry import tool_parser
from tinker_server.backends.model_spec import DRAWN_TOKENS
from tinker_server.backends.protocol import BackendFailed, ChatEndpoint, ChatTask, ChatUsage, InvalidInput
from tinker_server.backends.sampler.engine.chat.conversations import Conversations
from tinker_server.backends.sampler.engine.chat.engine_client import ChatEngine, Shared
from tinker_server.backends.sampler.engine.chat.prompts import TASK, chat_renderer
from tinker_server.backends.sampler.engine.chat.requests import parse
from tinker_server.backends.sampler.engine.chat.tool_calls import end_calls_outside_strings
from tinker_server.backends.sampler.engine.requests import THREADS

log = logging.getLogger(__name__)
_CALLS: dict[
    ChatEndpoint, Callable[[GenerateBaseServing, BaseModel], Awaitable[BaseModel | AsyncGenerator[str, None]]]
] = {
    "chat_completions": Conversations.create_chat_completion,
    "completions": OpenAIServingCompletion.create_completion,
    "messages": Conversations.create_messages,
    "count_tokens": Conversations.count_tokens,
}


class _Names:
    """A handler's view of its models: the server has looked the name up already."""

    lora_requests: dict[str, object] = {}
    base_model_paths: list[object] = []

    def __init__(self, name: str) -> None:
        self._name = name

    def is_base_model(self, name: str) -> bool:
        return True

    def model_name(self, _: object = None) -> str:
        return self._name


class _InTurns(OnlineRenderer):  # type: ignore[misc]
    """Renders one conversation of an owner at a time: thousands of messages hold up the event loop for part of a
    second, which sequences of others wait for."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._owners = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def render_chat(self, *given: Any, **named: Any) -> Any:
        """Render a conversation, behind those of its owner that came before."""
        async with self._owners[TASK.get().owner]:
            return await super().render_chat(*given, **named)


class Chats:
    """The handlers of an engine."""

    def __init__(self, engine: AsyncLLM, shared: Shared) -> None:
        self._shared = shared
        renderer = chat_renderer(engine.renderer, shared.renderer)
        self._is_harmony = engine.model_config.hf_config.model_type == gpt_oss.MODEL_TYPE
        self._tool_parser = None if self._is_harmony else _working_parser(engine)
        tools = {"enable_auto_tools": self._tool_parser is not None, "tool_parser": self._tool_parser}
        # A wrong guess of vLLM's puts all images before all text, silently.
        form = "openai" if shared.renderer.takes_images else "auto"
        template = {"chat_template": None, "chat_template_content_format": form, **tools}
        model_config = copy.copy(engine.model_config)
        model_config.max_model_len -= DRAWN_TOKENS
        renderer.model_config = model_config
        online = _InTurns(model_config, renderer, request_logger=None, **template)
        common = {"online_renderer": online, "request_logger": None, "enable_prompt_tokens_details": True}
        names = _Names("")
        completion = OpenAIServingCompletion(engine, names, **common)
        conversation = Conversations(engine, names, "assistant", **common, **template)
        for handler in (completion, conversation):
            # Temperature 1 by default, so that log probabilities are the model's own; a generation config may cut its
            # distribution.
            handler.default_sampling_params = {}
            handler.model_config = model_config
        self._handlers: dict[ChatEndpoint, GenerateBaseServing] = {
            "chat_completions": conversation,
            "completions": completion,
            "messages": conversation,
            "count_tokens": conversation,
        }

    async def answer(self, task: ChatTask, emit: Callable[[str], None]) -> ChatUsage:
        """Answer as `protocol.Sampler.chat`."""
        async with self._shared.weights.hold(task.weights) as held:
            engine = ChatEngine(self._shared, task, held)
            try:
                await self._answer(task, engine, emit)
            except (InvalidInput, BackendFailed):
                raise
            except Exception as error:
                raise engine.failure or _refusal(create_error_response(error), error) from error
            return replace(engine.usage, drawn=engine.samples())

    async def _answer(self, task: ChatTask, engine: ChatEngine, emit: Callable[[str], None]) -> None:
        if self._is_harmony and task.endpoint != "completions":
            raise InvalidInput(
                "gpt-oss is not supported here: vLLM writes its conversations in a format of its own (harmony), not by"
                " the model's chat template, and would download that; render the tokens yourself, and use completions"
                " or samples"
            )
        if task.body.get("tools") and self._tool_parser is None:
            raise InvalidInput("tools: this model's chat template has no tool format that the server parses")
        handler = copy.copy(self._handlers[task.endpoint])
        handler.engine_client, handler.models = engine, _Names(task.body["model"])
        request = await THREADS.run(task.owner, parse, task)  # thousands of messages take a second
        TASK.set(task)
        answer = await _CALLS[task.endpoint](handler, request)
        if isinstance(answer, ErrorResponse):
            raise engine.failure or _refusal(answer)
        if not isinstance(answer, AsyncGenerator):
            emit(answer.model_dump_json(exclude_none=task.endpoint in ("messages", "count_tokens")))
            return
        async with aclosing(answer) as events:
            async for event in events:
                if engine.failure is not None:  # the handler makes an event of it, with a text of its own
                    raise engine.failure
                emit(event)


def _refusal(answer: ErrorResponse, cause: Exception | None = None) -> InvalidInput | BackendFailed:
    """Return the error for a request that vLLM does not answer."""
    if answer.error.code < 500:
        named = f"{answer.error.param}: " if answer.error.param else ""
        return InvalidInput(f"{named}{answer.error.message}")
    log.error("a chat failed unexpectedly: %s", answer.error.message, exc_info=cause)
    return BackendFailed(f"the chat failed unexpectedly ({type(cause).__name__}); the server's log has the details")


def _working_parser(engine: AsyncLLM) -> str | None:
    """Return the parser of the model's tool calls, where its tokenizer has what that needs."""
    tokenizer = engine.renderer.tokenizer
    name = tool_parser(resolve_chat_template(tokenizer, None, [], model_config=engine.model_config))
    if name is None:
        return None
    end_calls_outside_strings()
    try:
        ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, tokenizer=tokenizer)
    except TypeError as error:
        log.warning("tool calls are not parsed: %s", error)
        return None
    return name
