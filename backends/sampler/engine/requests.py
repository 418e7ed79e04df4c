"""Turns a sampling task into the engine's inputs and parameters.

P prompt positions after the first, N tokens of an image, K chosen tokens
"""

import asyncio
import hashlib
import os
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from vllm.inputs import EngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from tinker_server.api_schemas.inputs import QUICK_CHUNKS, ImageChunk, ModelInput
from tinker_server.backends.families.family import ImageSpan, Vision
from tinker_server.backends.inputs.rendering import Rendered, Renderer
from tinker_server.backends.processes.fair_threads import FairThreads
from tinker_server.backends.protocol import PromptScores, SamplingTask
from tinker_server.backends.sampler.engine.vllm_patches.prompt_scores import Asked, extra_args

_AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""As many threads as an event loop's own."""
THREADS = FairThreads(_AT_ONCE, "requests", of_owner=_AT_ONCE // 2)
"""Threads for work on what owners have sent. Images of a prompt may take seconds, and no other owner waits for them."""


class Prompt:
    """A prompt rendered when its first sequence is admitted, so that waiting requests hold no pixels."""

    def __init__(
        self, renderer: Renderer, model_input: ModelInput, owner: str, where: str | Sequence[str] = "prompt"
    ) -> None:
        """`where` is as in `Renderer.layout`."""
        self._renderer, self._model_input, self._owner, self._where = renderer, model_input, owner, where
        self._lock = asyncio.Lock()
        self._result: tuple[Rendered, EngineInput] | None = None

    async def render(self) -> tuple[Rendered, EngineInput]:
        """Return the prompt in our form and in the engine's. Raises InvalidInput for pixels that do not decode."""
        async with self._lock:
            if self._result is None:
                chunks = self._model_input.chunks
                is_long = len(chunks) > QUICK_CHUNKS or any(isinstance(chunk, ImageChunk) for chunk in chunks)
                self._result = await THREADS.run(self._owner, self._render) if is_long else self._render()
            return self._result

    def _render(self) -> tuple[Rendered, EngineInput]:
        rendered = self._renderer.render(self._model_input, self._where)
        return rendered, engine_input(rendered, self._renderer.family.vision, self._owner)


def engine_input(rendered: Rendered, vision: Vision | None, owner: str) -> EngineInput:
    """Return a prompt whose images are expanded and normalised already; the engine must do neither again.

    The prefix cache is salted by owner: an answer tells how much was cached, and comes sooner.
    """
    token_ids, salt = rendered.token_ids_T.tolist(), f"owner {owner}"
    images = rendered.images
    if not images or vision is None:
        return tokens_input(token_ids, cache_salt=salt)
    fields = vision.engine_fields
    tensors = {name: torch.cat([image.tensors[name] for image in images]) for name in fields}
    layout = {}
    for name, field in fields.items():
        if field.one_row_each:
            layout[name] = MultiModalFieldConfig.batched("image", keep_on_cpu=field.stays_on_cpu)
        else:
            sizes = torch.tensor([len(image.tensors[name]) for image in images])
            layout[name] = MultiModalFieldConfig.flat_from_sizes("image", sizes, keep_on_cpu=field.stays_on_cpu)
    return mm_input(
        token_ids,
        MultiModalKwargsItems.from_hf_inputs(tensors, layout),
        {"image": [image.hash for image in images]},
        {"image": [_placeholder(rendered, span, vision) for span in rendered.spans]},
        cache_salt=salt,
    )


def _placeholder(rendered: Rendered, span: ImageSpan, vision: Vision) -> PlaceholderRange:
    """Return the image's span, and which of its positions take its features; no mask means all."""
    ids_N = rendered.token_ids_T[span.offset : span.offset + span.num_tokens]
    takes_N = torch.from_numpy(ids_N == vision.feature_id)
    return PlaceholderRange(offset=span.offset, length=span.num_tokens, is_embed=None if takes_N.all() else takes_N)


def send_once(engine: AsyncLLM, inputs: EngineInput) -> EngineInput:
    """Return the prompt without the pixels that the engine has cached, by its own record of them.

    An engine that has evicted some of them ends the request with an error, and its record is right again.
    """
    if inputs["type"] != "multimodal":
        return inputs
    sent = MultiModalKwargsItems({name: list(items) for name, items in inputs["mm_kwargs"].items()})
    engine.input_processor.inject_into_mm_cache(inputs["mm_hashes"], sent)  # puts None for what it has
    return {**inputs, "mm_kwargs": sent}


def sampling_params(
    task: SamplingTask, index: int, end_tokens: Sequence[int], placeholders: Sequence[int], most_tokens: int
) -> SamplingParams:
    """Return the engine's parameters for sample `index`, of `most_tokens` if the task names no number; the first one
    also scores the prompt."""
    params = task.params
    cuts = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)  # else the engine ignores them
    stop_tokens, stop_strings = stops(params.stop, end_tokens)
    num_scored = num_scored_tokens(task.scores)
    scores_prompt = index == 0 and (task.scores.logprobs or num_scored > 0)
    return SamplingParams(
        max_tokens=params.max_tokens or most_tokens,
        seed=None if params.seed is None else derive_seed(params.seed, index),
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        # Only for distributions that are cut; elsewhere `placeholders.py` keeps them from being sampled.
        logit_bias=dict.fromkeys(placeholders, float("-inf")) if cuts and placeholders else None,
        # The engine adds its own end tokens unless it ignores them.
        ignore_eos=True,
        stop_token_ids=stop_tokens,
        stop=stop_strings,
        detokenize=bool(stop_strings),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logprobs=task.topk,
        prompt_logprobs=num_scored if scores_prompt else None,
        extra_args=_tokens_to_score(task, placeholders) if scores_prompt else None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def stops(stop: str | list[str] | list[int] | None, end_tokens: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return token ids and strings that end a sample: the model's end tokens and the request's `stop`.

    Only an empty list switches the end tokens off.
    """
    asked = [stop] if isinstance(stop, str) else stop or []
    token_ids = [] if stop == [] else list(end_tokens)
    token_ids += [stop for stop in asked if isinstance(stop, int)]
    return list(dict.fromkeys(token_ids)), [stop for stop in asked if isinstance(stop, str)]


def num_scored_tokens(scores: PromptScores) -> int:
    """Return the entries of each prompt position beside the token itself: the likeliest, the chosen, the drawn."""
    targets = scores.targets
    num_targets = 0 if targets is None or targets.shape is None else targets.shape[1]
    return scores.topk + num_targets + scores.num_draws


def _tokens_to_score(task: SamplingTask, placeholders: Sequence[int]) -> dict[str, Asked] | None:
    """Return what the worker puts in the last columns of the prompt's log probabilities."""
    targets, params = task.scores.targets, task.params
    if targets is None and not task.scores.num_draws:
        return None
    targets_PK = np.empty((0, 0), np.int64) if targets is None else targets.to_array(fill=-1)
    seed = secrets.randbits(62) if params.seed is None else derive_seed(params.seed, -1)
    return extra_args(targets_PK, task.scores.num_draws, params.temperature, seed, placeholders)


def derive_seed(seed: int, index: int) -> int:
    """Return a seed per sample of a request, in the 62 bits that every generator takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "big") >> 2
