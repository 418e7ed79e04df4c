"""A part of a card (`--gpu-memory`): all processes of a model keep to it, train a whole context and sample.

pytest tests/gpu/test_part_of_a_card.py -s
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.shapes import SHAPES, make_model
from tests.factories import cross_entropy, image, make_renderer, present, prompt, words
from tests.gpu.agreement import assert_close, scoring_datum
from tests.gpu.parts import Parts, used_bytes
from tests.models import make_tiny_vl
from tests.sampling import sample, scoring
from tests.trainers import LORA, forward_backward, gradients, perturb, relative_distance, trainer
from tinker_server.api_schemas.training import AdamParams
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.configure.memory_plan import GIB, Machine
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import BasePrecision, Placement

pytestmark = pytest.mark.gpu
CASES: dict[str, tuple[str, float, dict[str, Any], BasePrecision | None]] = {
    "Qwen3-VL-4B": ("4b", 23.5, {}, None),
    "Qwen3.5-4B": ("qwen3.5-4b", 23.5, {}, None),
    "Qwen3-8B in fp8": ("8b-text", 23.5, {"base_precision": "fp8", "max_context_length": 4096}, "fp8"),
    "Llama-3.2-3B": ("3b-text", 15.5, {"max_context_length": 3072}, None),
}
"""A model's shape, the GiB, settings, and the precision of its files."""
ROUNDS_MORE = {"Qwen3.5-4B": 6}
"""Random weights that make rounding larger: here the embedding, which is the head too, is small."""


class Peak:
    """The most that the card had in use while it was watched."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def watch(self) -> None:
        while True:
            self.num_bytes = max(self.num_bytes, used_bytes())
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("case", CASES)
async def test_a_model_trains_a_context_and_samples_within_a_part_of_a_card(case: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shape, gib, settings, precision = CASES[case]
    source = make_model(tmp_path / "model", SHAPES[shape], precision=precision)
    config = BackendConfig(
        models={"m": str(source)}, gpu_memory_bytes=int(gib * GIB), scratch_dir=tmp_path / "scratch", **settings
    )
    card = Machine(0, [torch.cuda.get_device_properties(0).total_memory], ["card"])
    found = describe_models(config, card)["m"]
    spec, renderer = found.spec, Renderer(str(source), image_cache_bytes=1 << 26, max_image_pixels=10**7)
    torch.cuda.empty_cache()
    before, peak = used_bytes(), Peak()
    watching = asyncio.create_task(peak.watch())
    async with Parts(spec) as parts:
        print(f"{case}: {present(found.demand)}; {(used_bytes() - before) / GIB:.2f} GiB at rest")
        pictures = [image(96, 64, 1)] if renderer.takes_images else []
        num_words = spec.max_context_length - 300
        items = [scoring_datum(prompt(words(num_words, seed), *pictures), renderer) for seed in range(2)]
        items = [item for item in items if len(item.loss_fn_inputs["target_tokens"]) <= spec.max_context_length]
        assert items, "no input fits the context"
        model = await parts.trainer.create_model("m", LORA, "owner")
        for _ in range(2):
            began = time.monotonic()
            await parts.trainer.forward_backward(model, cross_entropy(items), backward=True)
            await parts.trainer.optim_step(model, AdamParams(learning_rate=1e-4))
            print(f"{case}: a step of {len(items)} samples in {time.monotonic() - began:.1f} s")
        long = scoring(prompt(words(num_words // 2, 9), *pictures))
        await asyncio.gather(*(sample(parts.sampler, long, None, f"owner {number}") for number in range(4)))
        await parts.trainer.delete_model(model)
        assert_close(case, await parts.difference(source), times=ROUNDS_MORE.get(case, 1))
    watching.cancel()
    taken = peak.num_bytes - before
    print(f"{case}: {taken / GIB:.2f} of {gib} GiB at most; planned {found.spec.placement}")
    assert taken <= gib * GIB


def test_inputs_that_wait_in_main_memory_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny_vl(tmp_path / "model")
    renderer, found = make_renderer(source), []
    items = [scoring_datum(prompt(words(50, seed), image(96, 64, seed), words(9)), renderer) for seed in range(3)]
    for offloads in (False, True):
        rank = trainer(
            source,
            device="cuda",
            dtype="bfloat16",
            placement=Placement(trainer_bytes=30 << 30),
            offloads_inputs=offloads,
        )
        rank.base._graphs = None
        monkeypatch.setattr(present(rank.base.memory), "layers_for", lambda _: 2)
        rank.create_model("m", LORA)
        perturb(rank, "m")
        output = present(forward_backward(rank, "m", cross_entropy(items), True))
        found.append((np.concatenate([one["logprobs"] for one in output.loss_fn_outputs]), gradients(rank, "m")))
    (wanted, of_wanted), (got, of_got) = found
    assert np.array_equal(got, wanted)
    assert relative_distance(of_got.values(), of_wanted.values()) < 1e-3  # sums by atomic additions may differ
