"""Slices of a packed microbatch are together the whole, with every feature of every image once.

pytest tests/unit/backends/trainer/model/test_context.py
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.factories import MIXED, make_renderer, prompt, words
from tests.models import FAMILIES
from tinker_server.api_schemas.inputs import ModelInput
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.model.context import slice_of, slice_tokens
from tinker_server.backends.trainer.model.packing import Microbatch, pack

CPU = torch.device("cpu")


def packed(source: Path, inputs: list[ModelInput]) -> Microbatch:
    renderer = make_renderer(source)
    rendered = [renderer.render(one, "datum") for one in inputs]
    samples = [(one, np.arange(len(one.token_ids_T))) for one in rendered]
    return pack(samples, renderer.family, CPU)


def slices(batch: Microbatch, scales_TR: Tensor, count: int) -> list[tuple[Microbatch, Tensor]]:
    return [slice_tokens(batch, scales_TR, World(rank, count, CPU)) for rank in range(count)]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("kind", ["Qwen3-VL MoE", "InternVL", "SmolVLM2", "Gemma 3 with images"])
def test_slices_are_together_the_whole(kind: str, count: int, tmp_path: Path) -> None:
    source = FAMILIES[kind](tmp_path / "model")
    whole = packed(source, [*MIXED.values()])
    num_tokens = len(whole.targets_TK)
    experts_LTK = torch.arange(6 * num_tokens).view(2, num_tokens, 3)
    whole = replace(whole, experts_LTK=experts_LTK, tower_scales=[torch.ones(1) * n for n in range(len(whole.images))])
    scales_TR = torch.rand(num_tokens, 4)
    found = slices(whole, scales_TR, count)

    def joined(tensors: list[Tensor], dim: int) -> Tensor:
        both = torch.cat(tensors, dim)
        padding = both.narrow(dim, num_tokens, both.shape[dim] - num_tokens)
        assert not padding.any()
        return both.narrow(dim, 0, num_tokens)

    assert len({len(scales) for _, scales in found}) == 1
    assert torch.equal(joined([scales for _, scales in found], 0), scales_TR)
    assert torch.equal(joined([one.targets_TK for one, _ in found], 0), whole.targets_TK)
    assert torch.equal(joined([one.experts_LTK for one, _ in found if one.experts_LTK is not None], 1), experts_LTK)
    for name, tensor in whole.model_inputs.items():
        assert torch.equal(joined([one.model_inputs[name] for one, _ in found], -1), tensor)
    seen: dict[int, list[int]] = {}
    for one, _ in found:
        ids = one.model_inputs["input_ids"]
        num_features = int((ids == make_renderer(source).family.vision.feature_id).sum())  # type: ignore[union-attr]
        parts = one.feature_parts or []
        assert sum(part.stop - part.start for part in parts) == num_features
        for scale, image, part in zip(one.tower_scales, one.images, parts, strict=True):
            assert scale is not None and image is whole.images[int(scale)]
            seen.setdefault(int(scale), []).extend(range(part.start, part.stop))
    assert seen == {index: [*range(len(tokens))] for index, tokens in enumerate(whole.feature_tokens())}
    assert any(len(one.images) < len(whole.images) for one, _ in found)


@pytest.mark.parametrize(
    ("length", "count", "size"), [(1, 2, 2), (3, 2, 2), (5, 2, 3), (8, 2, 4), (9, 8, 2), (2, 8, 2)]
)
def test_lengths_stay_the_wholes_and_padding_is_a_sample_of_its_own(
    length: int, count: int, size: int, tiny_text: Path
) -> None:
    whole = packed(tiny_text, [prompt(words(length))])
    num_tokens = len(whole.targets_TK)
    for rank, (one, _) in enumerate(slices(whole, torch.zeros(num_tokens, 1), count)):
        assert slice_of(num_tokens, World(rank, count, CPU)) == slice(rank * size, (rank + 1) * size)
        padding = count * size - num_tokens
        bounds = [*whole.cu_seqlens_host.tolist(), *([count * size] if padding else [])]
        assert one.cu_seqlens.tolist() == one.cu_seqlens_host.tolist() == bounds
        assert one.max_seqlen == max(np.diff(bounds))
        assert one.model_inputs["input_ids"].shape == (1, size)
