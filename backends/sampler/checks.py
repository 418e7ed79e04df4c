"""Validates a sample request before anything is computed.

Runs once, in the server; needs no weights and no engine. A request that passes can only fail on pixels
that do not decode.
"""

from typing import TYPE_CHECKING

from tinker_server.api_schemas.inputs import ImageChunk, TensorData
from tinker_server.api_schemas.sampling import SampleRequest, SamplingParams
from tinker_server.backends.model_spec import DRAWN_TOKENS
from tinker_server.backends.protocol import InvalidInput, PromptSize

if TYPE_CHECKING:  # it imports torch
    from tinker_server.backends.inputs.rendering import Renderer

MAX_TOPK = 100
"""Largest number of likeliest, chosen or drawn tokens per position, of each."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""The engine's own limits; it would silently raise a lower temperature to the lowest."""


def check_sample(renderer: "Renderer", request: SampleRequest, max_context_length: int, max_images: int) -> PromptSize:
    """Return the prompt's size, from its images' headers. Raises InvalidInput naming the field and what is allowed."""
    check_support(request)
    num_images = sum(isinstance(chunk, ImageChunk) for chunk in request.prompt.chunks)
    if num_images > max_images:
        raise InvalidInput(f"prompt: {num_images} images; {max_images} are allowed in one prompt")
    length, spans = renderer.layout(request.prompt, "prompt")
    if length == 0:
        raise InvalidInput("prompt: it is empty")
    _check_params(request.sampling_params, renderer.vocab_size)
    max_tokens = request.sampling_params.max_tokens or 1
    # Whoever scores a prompt asks for one token, the least that the SDK can: it need not fit.
    is_scoring = max_tokens == DRAWN_TOKENS and _scores_prompt(request)
    if length + (0 if is_scoring else max_tokens) > max_context_length:
        raise InvalidInput(
            "Prompt length plus max_tokens exceeds the model's context window:"
            f" {length} + {max_tokens} > {max_context_length}"
        )
    _check_suffix(request, length)
    if request.target_prompt_logprobs is not None:
        _check_targets(request.target_prompt_logprobs, length, renderer.vocab_size)
    vision = renderer.family.vision
    return PromptSize(length, 0 if vision is None else sum(vision.size_bytes(span.grid) for span in spans))


def _scores_prompt(request: SampleRequest) -> bool:
    asked = request.prompt_logprobs or request.topk_prompt_logprobs or request.prompt_alt_tokens_k
    return bool(asked) or request.target_prompt_logprobs is not None


def check_support(request: SampleRequest) -> None:
    """Raise InvalidInput for what no model here does."""
    if request.record_stability_info:
        raise InvalidInput(
            "record_stability_info is not supported: what it records, and stable_reinforce, which uses it, are not"
            " published; train with importance_sampling, ppo, cispo or gspo on the samples' own logprobs, or have the"
            " operator choose one of them by the setting backend.stable_reinforce"
        )
    for field, k in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs),
        ("topk_sample_logprobs", request.topk_sample_logprobs),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k),
    ):
        if k > MAX_TOPK:
            raise InvalidInput(f"{field} is {k}; at most {MAX_TOPK} are supported")


def _check_targets(targets: TensorData, length: int, vocab_size: int) -> None:
    shape = targets.shape or []
    if len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= MAX_TOPK:
        raise InvalidInput(
            f"target_prompt_logprobs has the shape {shape}; for a prompt of {length} tokens it must be"
            f" [{length - 1}, 1 to {MAX_TOPK}]"
        )
    if targets.dtype != "int64":
        raise InvalidInput(f"target_prompt_logprobs holds token ids: its dtype must be int64, not {targets.dtype}")
    try:
        ids = targets.to_array(fill=-1)
    except ValueError as error:
        raise InvalidInput(f"target_prompt_logprobs: {error}") from None
    for bad in (ids.min(initial=0), ids.max(initial=0)):
        if not -1 <= bad < vocab_size:
            raise InvalidInput(
                f"target_prompt_logprobs: token id {bad} is neither -1 (none) nor in the vocabulary"
                f" (0 to {vocab_size - 1})"
            )


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    if params.temperature != 0 and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        raise InvalidInput(
            f"sampling_params.temperature is {params.temperature};"
            f" it must be 0 (greedy) or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
        )
    for stop in [params.stop] if isinstance(params.stop, str) else params.stop or []:
        if stop == "":
            raise InvalidInput("sampling_params.stop: an empty string stops nothing; send [] for no stop")
        if isinstance(stop, int) and not 0 <= stop < vocab_size:
            raise InvalidInput(
                f"sampling_params.stop: token id {stop} is outside the vocabulary (0 to {vocab_size - 1})"
            )


def _check_suffix(request: SampleRequest, length: int) -> None:
    last_n = request.prompt_logprobs_last_n
    if last_n is None:
        return
    if not request.prompt_logprobs:
        raise InvalidInput("prompt_logprobs_last_n needs prompt_logprobs")
    if not 1 <= last_n <= length - 1:
        raise InvalidInput(
            f"prompt_logprobs_last_n is {last_n}; of a prompt of {length} tokens it must be 1 to {length - 1}"
        )
