"""vLLM's attention on the CPU for images whose tokens see each other (Gemma 3); vLLM leaves them causal, without an
error.

Each image is attended to once more, as the last tokens of a sequence that ends with it, without the causal mask: its
tokens see all of the image, and all that is before it, or what a window leaves.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from tinker_server.backends.sampler.engine.vllm_patches import targets


def _with_images(build: Callable[..., CPUAttentionMetadata]) -> Callable[..., CPUAttentionMetadata]:
    def build_metadata(
        self: CPUAttentionMetadataBuilder,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        metadata = build(self, common_prefix_len, common_attn_metadata, fast_build)
        images = _images(common_attn_metadata)
        metadata.images = None if images is None else (images[0], build(self, 0, images[1]))
        return metadata

    return build_metadata


def _images(step: CommonAttentionMetadata) -> tuple[Tensor, CommonAttentionMetadata] | None:
    """Return the rows of the step's images, and a batch that has each of them as the end of a sequence. None if it has
    none. Raises RuntimeError for an image that does not end in this step."""
    bounds, ends = step.query_start_loc.tolist(), step.seq_lens.tolist()
    rows: list[int] = []
    lengths, requests, last = [], [], []
    for request, ranges in (step.mm_req_doc_ranges or {}).items():
        first = ends[request] - (bounds[request + 1] - bounds[request])  # position of the step's first token
        for begin, end in ((max(begin, first), end + 1) for begin, end in ranges):
            if begin >= min(end, ends[request]):
                continue
            if end > ends[request]:
                raise RuntimeError(f"an image's tokens {begin} to {end} are cut at {ends[request]}")
            rows += range(bounds[request] + begin - first, bounds[request] + end - first)
            lengths.append(end - begin)
            requests.append(request)
            last.append(end)
    if not rows:
        return None
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=step.query_start_loc.dtype)
    rows_N = torch.tensor(rows)
    batch = step.replace(
        num_reqs=len(lengths),
        num_actual_tokens=len(rows),
        max_query_len=max(lengths),
        max_seq_len=max(last),
        query_start_loc=cu_seqlens,
        query_start_loc_cpu=cu_seqlens,
        seq_lens=torch.tensor(last, dtype=step.seq_lens.dtype),
        block_table_tensor=step.block_table_tensor[requests],
        slot_mapping=step.slot_mapping[rows_N],
        causal=False,
        mm_req_doc_ranges=None,
    )
    return rows_N, batch


def _attending_images(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(  # noqa: PLR0913 - vLLM's own arguments
        self: CPUAttentionBackendImpl,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        *others: Any,
        **named: Any,
    ) -> Tensor:
        result = forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *others, **named)
        if attn_metadata is not None and attn_metadata.images is not None:
            rows_N, batch = attn_metadata.images
            own = torch.empty_like(output[rows_N])
            forward(self, layer, query[rows_N], key[rows_N], value[rows_N], kv_cache, batch, own, *others, **named)
            output[rows_N] = own
        return result

    return attend


def attend_to_images_on_cpu() -> None:
    """Let an image's tokens see each other on the CPU."""
    targets.CPU_IMAGES.replace(_with_images(CPUAttentionMetadataBuilder.build))
    targets.CPU_ATTENTION.replace(_attending_images(CPUAttentionBackendImpl.forward))
