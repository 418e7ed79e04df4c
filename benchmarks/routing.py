"""How far rounding sends tokens to other experts, and what that does to log probabilities, in the trainer and sampler.

    python benchmarks/routing.py [--model DIRECTORY] [--device auto] [--samples 32] [--tokens 64]

Without a directory it makes a random Qwen3 MoE of 8 layers with 32 experts, 4 of them for a token. vLLM 0.32 tells
its routing on CUDA alone (`enable_return_routed_experts`), so what is told of experts is the trainer's, in bfloat16
beside float32. "Replayed" is bfloat16 by the experts that float32 chose.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from api_schemas.inputs import EncodedTextChunk, ModelInput
from backends.rendering import Rendered
from backends.sampler.client import SamplerClient
from backends.trainer.batching import pack
from backends.trainer.parallel import World
from backends.trainer.rank import TrainerRank
from tests.models import make_tiny_moe
from tests.sampling import request, sample, sampler_config
from tests.trainers import config as trainer_config

PROMPT = 16
"""Random tokens of a sample before those that are drawn."""
Dtype = Literal["float32", "bfloat16"]
Device = Literal["cpu", "cuda"]
Ids = list[int]


def make_model(directory: Path) -> Path:
    """Random weights of a width that keeps the size of what passes them, and the tiny model's tokenizer."""
    make_tiny_moe(directory)
    tiny = Qwen3MoeConfig.from_pretrained(directory)
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}
    # By the name that `to_dict` gives, which wins over its alias num_experts.
    experts = {"num_local_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "mlp_only_layers": []}
    wide = Qwen3MoeConfig(**{**tiny.to_dict(), **sizes, **experts})
    assert wide.num_experts == experts["num_local_experts"]
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(wide)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


class Routers:
    """What the routers of a model's layers choose, and a way to choose for them."""

    def __init__(self, model: nn.Module) -> None:
        self._replayed: Iterator[Tensor] | None = None
        self._chosen: list[Tensor] = []
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        assert routers, "the model has no routers that are known here"
        for router in routers:
            router.register_forward_hook(self._choose)

    @contextmanager
    def recorded(self, replayed: Sequence[Tensor] | None = None) -> Iterator[list[Tensor]]:
        """Inside, what they choose, layer by layer [T, K]; or they take these experts, with their own weights."""
        self._chosen, self._replayed = [], None if replayed is None else iter(replayed)
        yield self._chosen

    def _choose(self, router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits_TE, scores_TK, experts_TK = output
        if self._replayed is not None:
            experts_TK = next(self._replayed)
            weights_TK = logits_TE.float().softmax(-1).gather(-1, experts_TK)
            if getattr(router, "norm_topk_prob", True):
                weights_TK /= weights_TK.sum(-1, keepdim=True)
            scores_TK = weights_TK.to(scores_TK.dtype)
        self._chosen.append(experts_TK)
        return logits_TE, scores_TK, experts_TK


class Trained:
    """The trainer's base in one precision."""

    def __init__(self, source: Path, dtype: Dtype, device: Device) -> None:
        config = replace(trainer_config(source, max_context_length=4096), dtype=dtype, device=device)
        base = TrainerRank(config, World(0, 1, torch.device(device))).base
        self._scorer, self._family = base.scorer, base.renderer.family
        self._device = torch.device(device)
        self._routers = Routers(base.scorer.model)
        base.adapters.load([])

    def score(self, ids: Ids, replayed: Sequence[Tensor] | None = None) -> tuple[np.ndarray, list[Tensor]]:
        """Log probabilities [T] of all tokens but the first, and the experts of each layer."""
        tokens_T = np.array(ids)
        batch = pack([(Rendered(tokens_T[:-1], [], []), tokens_T[1:])], self._family, self._device)
        with torch.no_grad(), self._routers.recorded(replayed) as chosen:
            scores = self._scorer(batch, self._scorer.adapters.blank(len(tokens_T) - 1))
        return scores[:, 0].float().cpu().numpy(), chosen


async def draw(source: Path, dtype: Dtype, device: Device, num: int, length: int) -> list[tuple[Ids, np.ndarray]]:
    """The engine's samples: a prompt and what was drawn, and the log probabilities of the latter."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 256, PROMPT) for _ in range(num)]
    inputs = [ModelInput(chunks=[EncodedTextChunk(tokens=prompt.astype(np.int32))]) for prompt in prompts]
    with tempfile.TemporaryDirectory() as scratch:
        sampler = SamplerClient(replace(sampler_config(source, Path(scratch)), dtype=dtype, device=device))
        await sampler.start()
        try:
            params = {"max_tokens": length, "stop": []}
            works = [sample(sampler, request(one, {**params, "seed": seed}), None) for seed, one in enumerate(inputs)]
            responses = await asyncio.gather(*works)
        finally:
            await sampler.stop()
    drawn = [response.sequences[0] for response in responses]
    return [([*p.tolist(), *d.tokens.tolist()], np.array(d.logprobs)) for p, d in zip(prompts, drawn, strict=True)]


def show(what: str, differences: Sequence[np.ndarray]) -> None:
    every = np.abs(np.concatenate(differences))
    print(f"{what:<58} mean {every.mean():.2g}  max {every.max():.2g} nats, {len(every)} tokens")


def share(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> float:
    """The part of tokens, of all layers, that have another set of experts."""
    pairs = [
        (a.sort(-1).values != b.sort(-1).values).any(-1)
        for of_one, of_other in zip(one, other, strict=True)
        for a, b in zip(of_one, of_other, strict=True)
    ]
    return torch.cat(pairs).float().mean().item()


def compare(source: Path, device: Device, num: int, length: int) -> None:
    """Print all figures."""
    bases: dict[Dtype, Trained] = {dtype: Trained(source, dtype, device) for dtype in get_args(Dtype)}
    precise, rounded = bases.values()
    for dtype, trained in bases.items():
        drawn = asyncio.run(draw(source, dtype, device, num, length))
        show(f"{dtype}: trainer - sampler", [trained.score(ids)[0][PROMPT - 1 :] - got for ids, got in drawn])
    texts = [ids for ids, _ in drawn]
    wanted = [precise.score(ids) for ids in texts]
    plain = [rounded.score(ids) for ids in texts]
    replayed = [rounded.score(ids, experts) for ids, (_, experts) in zip(texts, wanted, strict=True)]
    for what, found in (("bfloat16 - float32", plain), ("bfloat16 - float32, experts replayed", replayed)):
        show(f"trainer: {what}", [a - b for (a, _), (b, _) in zip(found, wanted, strict=True)])
    other = share([experts for _, experts in plain], [experts for _, experts in wanted])
    print(f"trainer: {other:.1%} of tokens x layers have other experts in bfloat16 than in float32")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    on_gpu = given.device == "cuda" or (given.device == "auto" and torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as directory:
        compare(
            given.model or make_model(Path(directory) / "model"),
            "cuda" if on_gpu else "cpu",
            given.samples,
            given.tokens,
        )
