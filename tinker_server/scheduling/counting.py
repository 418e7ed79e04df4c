"""How many tokens an operation went through."""

from api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from api_schemas.sampling import SampleRequest, SampleResponse
from api_schemas.training import ForwardBackwardOutput
from tinker_server.store.usage import UsageStore


def count_training(usage: UsageStore, session_id: str, base_model: str, output: ForwardBackwardOutput) -> None:
    """Every position of every datum; images as many as they are expanded to."""
    tokens = sum(len(outputs["logprobs"]) for outputs in output.loss_fn_outputs)
    usage.count("training", session_id, base_model, tokens)


def count_sample(
    usage: UsageStore, session_id: str, base_model: str, request: SampleRequest, response: SampleResponse
) -> None:
    """Prompt tokens once, however many continuations were drawn from them."""
    cached = response.prompt_cache_hit_tokens
    usage.count("prefill", session_id, base_model, _length(request.prompt) - cached)
    usage.count("cached_prefill", session_id, base_model, cached)
    usage.count("sampled", session_id, base_model, sum(len(sequence.tokens) for sequence in response.sequences))


def _length(prompt: ModelInput) -> int:
    """Tokens of a prompt; an image whose client did not say how many it expects is not counted."""
    length = 0
    for chunk in prompt.chunks:
        if isinstance(chunk, EncodedTextChunk):
            length += len(chunk.tokens)
        elif isinstance(chunk, ImageChunk):
            length += chunk.expected_tokens or 0
    return length
