"""Parses a chat's body by vLLM's models, at a cost that is bounded by the body.

pydantic goes on after an error, and keeps kilobytes of each. So in the models used here every list, however deep, ends
at its first error.
"""

from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tinker_server.backends.protocol import ChatEndpoint, ChatTask, InvalidInput

_REQUESTS: dict[ChatEndpoint, type[BaseModel]] = {
    "chat_completions": ChatCompletionRequest,
    "completions": CompletionRequest,
    "messages": AnthropicMessagesRequest,
    "count_tokens": AnthropicCountTokensRequest,
}
_LISTS = ("list", "tuple", "set", "frozenset")


def parse(task: ChatTask) -> BaseModel:
    """Return the vendor's request. Raises InvalidInput naming the first error."""
    try:
        request: BaseModel = _validator(_REQUESTS[task.endpoint]).validate_python(task.body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        # Of a field that may be a text or a list, each form has an error. The form that was meant has the right type.
        first = next((error for error in errors if not error["type"].endswith("_type")), errors[0])
        location = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"{location or 'the body'}: {first['msg']}") from None
    return request


@cache
def _validator(request: type[BaseModel]) -> SchemaValidator:
    """Return a validator.

    Models within the request have validators already, without this change: they are made again.
    """
    return SchemaValidator(_failing_fast(request.__pydantic_core_schema__), _use_prebuilt=False)


def _failing_fast(schema: Any) -> Any:
    """Return the same schema, with lists that end at their first error."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_failing_fast, schema))
    if not isinstance(schema, dict):
        return schema
    copy = {key: _failing_fast(value) for key, value in schema.items()}
    if copy.get("type") in _LISTS:
        copy["fail_fast"] = True
    return copy
