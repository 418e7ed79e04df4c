"""Calls between <tool_call> tags, which vLLM's parser ends too early."""

import re

from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.utils import is_complete_json, partial_tag_overlap

from tinker_server.backends.sampler.engine.vllm_patches.targets import TOOL_CALL_ENDS

_BEGIN, _END = Hermes2ProToolParser.tool_call_start_token, Hermes2ProToolParser.tool_call_end_token
_STRING_OR_END = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|$)|{_END}', re.DOTALL)


def end_calls_outside_strings() -> None:
    """Have vLLM's parser end a call at the first end tag outside of its strings."""
    TOOL_CALL_ENDS.replace(_find_calls)


def _find_calls(_: Hermes2ProToolParser, text: str) -> list[tuple[str, bool]]:
    """Return the JSON of each call, and whether it is whole."""
    found: list[tuple[str, bool]] = []
    at = text.find(_BEGIN)
    while at >= 0:
        first = at + len(_BEGIN)
        end = next((piece.start() for piece in _STRING_OR_END.finditer(text, first) if piece[0] == _END), -1)
        if end < 0:
            rest = text[first:]
            call = rest[: len(rest) - partial_tag_overlap(rest, _END)].strip()
            return [*found, (call, bool(call) and is_complete_json(call))]
        found.append((text[first:end].strip(), True))
        at = text.find(_BEGIN, end)
    return found
