"""Checks of what the messages of a chat say: whatever would not reach the prompt is refused by name.

vLLM takes arguments of a call that are no JSON object for none, and passes over fields that it does not know.
"""

import json
from collections.abc import Iterator
from typing import Any

from tinker_server.chat.bounds import quote
from tinker_server.errors import BadField


def require_arguments(messages: object) -> None:
    """Have the arguments of each earlier call as the text of a JSON object, which a client may also send as an object.

    Raises BadField.
    """
    for index, message in enumerate(_objects(messages)):
        for at, call in enumerate(_objects(message.get("tool_calls"))):
            if isinstance(function := call.get("function"), dict):
                arguments = function.get("arguments")
                function["arguments"] = text_of(arguments, f"messages.{index}.tool_calls.{at}.function.arguments")


def text_of(arguments: object, where: str) -> str:
    """Return the arguments of a call as text. None and an empty text stand for no arguments. Raises BadField."""
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, dict):
        return json.dumps(arguments)
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadField(f"{where} is {quote(arguments)}; it must be a JSON object, or the text of one", _root(where))
    assert isinstance(arguments, str)
    return arguments


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list."""
    for item in value if isinstance(value, list) else ():
        assert isinstance(item, dict)  # `require_bounded`
        yield item


def _root(where: str) -> str:
    return where.partition(".")[0]
