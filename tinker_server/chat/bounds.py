"""Bounds on the size of a chat request, checked before vLLM's pydantic models parse it.

pydantic collects several kilobytes of errors for each invalid value, and a grammar of a few characters may have
billions of states. These bounds limit how large a small body can become.
"""

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from re import _constants as sre_constants  # type: ignore[attr-defined, unused-ignore]
from re import _parser as sre_parser  # type: ignore[attr-defined, unused-ignore]

from tinker_server.api_schemas.base import NOTED_BYTES, unstorable
from tinker_server.errors import BadField

QUOTED = 100
"""Characters of a value that a refusal quotes."""
MAX_NAME = 1024
"""Characters of a field's name, and of `model`."""
MAX_MESSAGES = 8192
MAX_PARTS = 8192
"""Content parts and tool calls of all messages together."""
MAX_TOOLS = 1024
MAX_STOPS = {"stop": 4, "stop_sequences": 4, "stop_token_ids": 1024}
"""Texts and token ids that end an answer. The engine takes four texts."""
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1000
"""Entries of logit_bias. On a GPU the engine takes 1,024, with those of image placeholders, and ends with more."""
MAX_VALUES = 1 << 16
"""JSON values of a body, without `prompt`, whose token ids may fill a context."""
MAX_PATTERN, MAX_PATTERNS = 4096, 16 << 10
"""Characters of a regular expression in a schema, and of all in a request, which take up to 0.2 s to check."""
MAX_FORMAT = 1 << 18
"""Characters of response_format without its punctuation; an engine allows its grammar as many with it."""
MAX_REPETITION = 10_000
"""Largest product of the counts of nested repetitions, with which the engine's cost per step grows."""
_REPEATS = (sre_constants.MAX_REPEAT, sre_constants.MIN_REPEAT, sre_constants.POSSESSIVE_REPEAT)
_BLOCKS = {"messages": MAX_MESSAGES, "tools": MAX_TOOLS, "system": MAX_PARTS}
"""Fields that are lists of objects, with their largest lengths."""
_PARTS = ("content", "tool_calls")
"""Fields of a message, and of a part, that are lists of objects."""


def require_bounded(body: Mapping[str, object]) -> None:
    """Raise BadField for a body with a field that is too large, or with plain values where objects are required."""
    for field, most in _BLOCKS.items():
        _require_objects(body.get(field), field, most)
    num_parts = 0
    for field in ("messages", "system"):
        for where, part in _parts(body.get(field), field):
            num_parts += 1
            if num_parts > MAX_PARTS + MAX_MESSAGES:
                raise BadField(f"{field} has more than {MAX_PARTS} parts in its messages", field)
            for name in _PARTS:
                _require_objects(part.get(name), f"{where}.{name}", MAX_PARTS)
    _require_quick_patterns({field: list(_patterns(body.get(field))) for field in ("response_format", "tools")})
    _require_format(body.get("response_format"))
    for field, most in MAX_STOPS.items():
        _require_stops(body.get(field), field, most)
    _require_biases(body.get("logit_bias"))
    _require_prompt(body.get("prompt"))
    counted = (value for field, value in body.items() if field != "prompt")
    if sum(1 for _ in _values(counted)) > MAX_VALUES:
        raise BadField(f"the request has more than {MAX_VALUES} values")


def count_text(body: Mapping[str, object]) -> int:
    """Count the characters of all texts, images as base64 among them."""
    prompt = body.get("prompt")
    of_prompts = prompt if isinstance(prompt, list) else [prompt]
    others = _values(value for field, value in body.items() if field != "prompt")
    return sum(len(value) for value in chain(of_prompts, others) if isinstance(value, str))


def require_echoed(value: object, field: str) -> None:
    """Raise BadField for a value that is too large to come back in each event of an answer."""
    if (problem := unstorable(value)) is not None:
        raise BadField(f"{field} {problem}", field)
    if sum(map(_size, _values([value]))) > NOTED_BYTES:
        raise BadField(f"{field} is larger than {NOTED_BYTES} bytes", field)


def _size(value: object) -> int:
    """Return about the bytes of a value as JSON, without what it holds."""
    if isinstance(value, dict):
        return sum(map(len, value))
    return len(value) if isinstance(value, str) else 1


def _parts(value: object, where: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield all objects of a list and of their nested lists, the outer objects first."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield f"{where}.{index}", item
            for name in _PARTS:
                yield from _parts(item.get(name), f"{where}.{index}.{name}")


def _require_objects(value: object, where: str, most: int) -> None:
    if not isinstance(value, list):
        if value is not None and not isinstance(value, str):
            raise BadField(f"{where} is {_name_type(value)}; it must be a list of objects", where.partition(".")[0])
        return
    if len(value) > most:
        raise BadField(f"{where} has {len(value)} items; {most} are allowed", where.partition(".")[0])
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadField(f"{where}.{index} is {_name_type(item)}; it must be an object", where.partition(".")[0])


def _require_format(value: object) -> None:
    """Refuse structural tags given as lists of structures and triggers, which no answer here would follow, and what is
    too large for an engine, whose event loop owners share."""
    if (size := sum(map(_size, _values([value])))) > MAX_FORMAT:
        raise BadField(
            f"response_format has {size} characters; {MAX_FORMAT} are allowed for a grammar", "response_format"
        )
    if isinstance(value, dict) and not value.keys().isdisjoint(("structures", "triggers")):
        raise BadField("response_format.structures is not supported; structural_tag takes a format", "response_format")


def _require_stops(value: object, field: str, most: int) -> None:
    stops = value if isinstance(value, list) else [] if value is None else [value]
    kind, kinds = (int, "token ids") if field == "stop_token_ids" else (str, "texts")
    if len(stops) > most:
        raise BadField(f"{field} has {len(stops)} items; {most} are allowed", field)
    for stop in stops:
        if isinstance(stop, str) and len(stop) > MAX_STOP_CHARACTERS:
            raise BadField(f"{field} has one of {len(stop)} characters; {MAX_STOP_CHARACTERS} are allowed", field)
        if not isinstance(stop, kind):
            raise BadField(f"{field} holds {_name_type(stop)}; it must hold {kinds}", field)


def _require_biases(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(bias, int | float) for bias in value.values()):
        raise BadField("logit_bias must be an object of numbers by token id", "logit_bias")
    if len(value) > MAX_BIASES:
        raise BadField(f"logit_bias has {len(value)} tokens; {MAX_BIASES} are allowed", "logit_bias")


def _require_prompt(value: object) -> None:
    """Require a text, a list of texts, a list of token ids, or a list of such lists."""
    if value is None or isinstance(value, str):
        return
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value) or all(isinstance(item, str) for item in value):
            return
        if all(isinstance(prompt, list) and all(type(token) is int for token in prompt) for prompt in value):
            return
    raise BadField("prompt must be a text, a list of texts, a list of token ids, or a list of such lists", "prompt")


def _patterns(value: object) -> Iterator[str]:
    """Yield all regular expressions of a schema."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name in ("pattern", "regex") and isinstance(item, str):
                yield item
            elif name == "patternProperties" and isinstance(item, dict):
                yield from item
            yield from _patterns(item)
    elif isinstance(value, list):
        for item in value:
            yield from _patterns(item)


def _require_quick_patterns(patterns: Mapping[str, Sequence[str]]) -> None:
    """Refuse patterns by their lengths before the first is parsed."""
    left = MAX_PATTERNS
    for field, of_field in patterns.items():
        if (longest := max(map(len, of_field), default=0)) > MAX_PATTERN:
            raise BadField(f"{field} has a pattern of {longest} characters; {MAX_PATTERN} are allowed", field)
        left -= sum(map(len, of_field))
        if left < 0:
            raise BadField(
                f"the patterns of response_format and tools have {MAX_PATTERNS - left} characters;"
                f" {MAX_PATTERNS} are allowed in one request",
                field,
            )
    for field, of_field in patterns.items():
        for pattern in dict.fromkeys(of_field):
            _require_quick_pattern(pattern, field)


def _require_quick_pattern(pattern: str, field: str) -> None:
    try:
        repeated = _repetition(sre_parser.parse(pattern))
    except RecursionError:
        raise BadField(f"{field} has a pattern that is nested too deeply", field) from None
    except (re.error, OverflowError):  # another dialect of regular expressions, which the engine checks
        return
    if repeated > MAX_REPETITION:
        raise BadField(
            f"{field} has a pattern whose nested repetitions come to {repeated}; {MAX_REPETITION} are allowed",
            field,
        )


def _repetition(parsed: sre_parser.SubPattern) -> int:
    """Return the largest product of the counts of nested repetitions; an unbounded repetition counts as 1."""
    largest = 1
    for operator, argument in parsed:
        count = 1
        if operator in _REPEATS:
            count = 1 if argument[1] is sre_parser.MAXREPEAT else max(1, int(argument[1]))
        parts = argument if isinstance(argument, tuple | list) else (argument,)
        inner = [
            _repetition(part)
            for group in parts
            for part in (group if isinstance(group, list) else [group])
            if isinstance(part, sre_parser.SubPattern)
        ]
        largest = max(largest, count * max(inner, default=1))
    return largest


def _values(values: Iterable[object]) -> Iterator[object]:
    """Yield every value at any depth; `unstorable` has bounded the depth."""
    for value in values:
        yield value
        if isinstance(value, dict):
            yield from _values(value.values())
        elif isinstance(value, list):
            yield from _values(value)


def quote(value: object) -> str:
    """Return the beginning of a value as a refusal quotes it, however large or nested it is."""
    return value[:QUOTED] if isinstance(value, str) else reprlib.repr(value)[:QUOTED]


def _name_type(value: object) -> str:
    """Return the JSON type of a value, in words."""
    if value is None:
        return "null"
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return kinds[type(value)]
