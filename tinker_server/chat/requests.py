"""Parsing of chat requests. A field means what its vendor documents, or vLLM if the vendor has no such field."""

import json
import re
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass
from typing import Any

from tinker_server.api_schemas.base import unstorable
from tinker_server.api_schemas.inputs import MAX_IMAGE_CHARS
from tinker_server.backends.protocol import ChatEndpoint
from tinker_server.chat.bounds import MAX_NAME, count_text, quote, require_bounded
from tinker_server.chat.fields import ANY, SHAPES, is_moot, require_known
from tinker_server.chat.images import DATA, sources
from tinker_server.chat.messages import require_arguments
from tinker_server.errors import BadField

MAX_CHOICES = 128
"""Answers to a prompt."""
MAX_TEXT_BYTES = 16 << 20
"""Bytes of a body beside its images; a context of a million tokens has some five million."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Bounds as for samples; the engine would silently raise a lower temperature to the lowest."""
_DATA_FIELD = re.compile(rb'"data"\s*:\s*"$')
_SAMPLING_FIELDS = (
    "model stream stream_options n seed stop stop_token_ids include_stop_str_in_output skip_special_tokens"
    " max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias"
    " logprobs response_format return_token_ids return_tokens_as_token_ids user"
)
_CONVERSATION_FIELDS = "model messages system tools tool_choice chat_template_kwargs"
FIELDS: dict[ChatEndpoint, frozenset[str]] = {
    "chat_completions": frozenset(
        f"{_SAMPLING_FIELDS} messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls"
        " reasoning_effort chat_template_kwargs add_generation_prompt continue_final_message".split()
    ),
    "completions": frozenset(f"{_SAMPLING_FIELDS} prompt echo add_special_tokens".split()),
    "messages": frozenset(
        f"{_CONVERSATION_FIELDS} max_tokens stop_sequences stream temperature top_p top_k metadata".split()
    ),
    "count_tokens": frozenset(_CONVERSATION_FIELDS.split()),
}
"""Supported fields. vLLM has many more, which are for its operator or would let owners affect one another."""

WITHOUT_EFFECT: dict[ChatEndpoint, dict[str, tuple[object, ...]]] = {
    "chat_completions": {
        "metadata": (ANY,),
        "prompt_cache_key": (ANY,),
        "prompt_cache_retention": (ANY,),
        "safety_identifier": (ANY,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "verbosity": ("medium",),
    },
    "completions": {"best_of": (1,)},
    "messages": {"service_tier": ("auto", "standard_only"), "thinking": ({"type": "disabled"},)},
    "count_tokens": {"thinking": ({"type": "disabled"},)},
}
"""Fields that change nothing here, with the values for which that is true. docs/chat.md has them for clients."""


@dataclass(frozen=True)
class ChatRequest:
    """A request that has passed all checks that need no model."""

    endpoint: ChatEndpoint
    model: str
    streamed: bool
    num_sequences: int
    """Number of sequences that the engine samples."""
    num_messages: int
    body: dict[str, object]
    size_bytes: int
    image_fields: tuple[str, ...]
    """As in ChatTask."""


async def receive(pieces: AsyncIterable[bytes]) -> bytearray:
    """Join a body's pieces as they come. Raises BadField as soon as they have too much text beside images, or too
    large an image.

    A long call, to join or to parse it, would stop all threads meanwhile.
    """
    content, num_text, string_at = bytearray(), 0, 0
    async for piece in pieces:
        at = len(content)
        content += piece
        first, last = content.find(b'"', at), content.rfind(b'"', at)
        string_end = len(content) if first < 0 else first
        if not _is_image(content, string_at):
            num_text += string_end - at
        elif string_end - string_at > MAX_IMAGE_CHARS:
            raise BadField(f"the request has an image of more than {MAX_IMAGE_CHARS} characters")
        if first >= 0:
            num_text += len(content) - first
            string_at = last + 1
        if num_text > MAX_TEXT_BYTES:
            raise BadField(f"the request has more than {MAX_TEXT_BYTES} bytes beside its images")
    return content


def _is_image(content: bytearray, at: int) -> bool:
    """Return whether the string that begins here is an image's data, in either vendor's form."""
    is_uri = content[at : at + len(DATA)].lower() == DATA.encode()
    return is_uri or _DATA_FIELD.search(content, max(0, at - 16), at) is not None


def read(endpoint: ChatEndpoint, content: bytes | bytearray) -> ChatRequest:
    """Parse and check a body. Raises BadField."""
    return check(endpoint, parse(content), len(content))


def parse(content: bytes | bytearray) -> dict[str, Any]:
    """Parse a body. Raises BadField."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise BadField("the body is no JSON") from None
    if not isinstance(body, dict):
        raise BadField("the body is no JSON object")
    if (longest := max(map(len, body), default=0)) > MAX_NAME:
        raise BadField(f"the body has a field whose name has {longest} characters; {MAX_NAME} are allowed")
    return body


def check(endpoint: ChatEndpoint, body: dict[str, Any], size_bytes: int) -> ChatRequest:
    """Check a parsed body. Raises BadField."""
    body = {
        field: value
        for field, value in body.items()
        if value is not None and not is_moot(value, WITHOUT_EFFECT[endpoint].get(field, ()))
    }
    for field, value in body.items():
        if field not in FIELDS[endpoint]:
            allowed = ", ".join(sorted(FIELDS[endpoint]))
            moot = WITHOUT_EFFECT[endpoint].get(field)
            raise BadField(
                f"{field} is not supported; supported are {allowed}"
                if moot is None
                else f"{field} is {quote(value)}; supported is {' or '.join(map(json.dumps, moot))}",
                field,
            )
        if (problem := unstorable(value)) is not None:
            raise BadField(f"{field} {problem}", field)
    require_bounded(body)
    # What `receive` takes for an image may be a text.
    sent = [] if endpoint == "completions" else list(sources(body.get("messages"), "messages"))
    images = sum(len(holder[key]) for _, holder, key in sent if isinstance(holder[key], str))
    if count_text(body) - images > MAX_TEXT_BYTES:
        raise BadField(f"the request has more than {MAX_TEXT_BYTES} bytes beside its images")
    require_known(body, SHAPES[endpoint])
    require_arguments(body.get("messages"))
    model = body.get("model")
    if not isinstance(model, str) or len(model) > MAX_NAME:
        raise BadField("model is missing: the name of a base model, a tinker:// path, or both as base;path", "model")
    n = _get_field(body, "n", 1, lambda n: isinstance(n, int) and 1 <= n <= MAX_CHOICES, f"1 to {MAX_CHOICES}")
    _get_field(body, "temperature", 1, _is_temperature, f"0 (greedy) or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}")
    streamed = _get_field(body, "stream", False, lambda value: isinstance(value, bool), "true or false")
    prompts = _num_prompts(body.get("prompt"))
    if prompts * n > MAX_CHOICES:
        raise BadField(f"{prompts} prompts with n {n}; {MAX_CHOICES} sequences are allowed in one request", "prompt")
    fields = tuple(field for field, _, _ in sent)
    messages = 0 if endpoint == "completions" else len(body.get("messages", ()))
    return ChatRequest(endpoint, model, streamed, prompts * n, messages, body, size_bytes, fields)


def _get_field(body: dict[str, object], field: str, default: Any, is_good: Callable[[Any], bool], allowed: str) -> Any:
    value = default if body.get(field) is None else body[field]
    if not is_good(value):
        raise BadField(f"{field} is {quote(value)}; it must be {allowed}", field)
    return value


def _is_temperature(value: object) -> bool:
    return isinstance(value, int | float) and (value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE)


def _num_prompts(prompt: object) -> int:
    """Return the number of prompts: a list holds several, unless it holds one prompt's token ids."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
