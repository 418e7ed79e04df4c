"""Tokens that rounding sends to other experts in trainer and sampler, and the effect on log probabilities.

    python benchmarks/routing.py [--model DIRECTORY] [--device auto] [--samples 32] [--tokens 64]

Without a directory it makes a random Qwen3 MoE of 8 layers with 32 experts, 4 of them for a token. "Replayed" is as by
a server that was started with `--replay-routing`: the trainer sends what was sampled to the experts that sampled it.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.factories import cross_entropy
from tests.models import make_wide_moe
from tests.sampling import request, sample, sampler_config
from tests.trainers import OWNER, forward_backward, perturb
from tests.trainers import config as trainer_config
from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.formats.expert_routing import read_routing, routing_name
from tinker_server.backends.inputs.rendering import Rendered
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

PROMPT = 16
"""Random tokens of a sample's prompt."""
NAME = "m"
Dtype = Literal["float32", "bfloat16"]
Device = Literal["cpu", "cuda"]


class Drawn:
    """A prompt and its sampled continuation."""

    def __init__(self, prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        self.token_ids_T = np.concatenate([prompt, tokens]).astype(np.int64)
        self.logprobs = logprobs

    @property
    def datum(self) -> Datum:
        """Make the datum that is scored."""
        ids = self.token_ids_T
        text = ModelInput(chunks=[EncodedTextChunk(tokens=ids[:-1].astype(np.int32))])
        return Datum(
            model_input=text, loss_fn_inputs={"target_tokens": ids[1:], "weights": np.ones(len(ids) - 1, np.float32)}
        )


class Trained:
    """A trainer with one model, whose choice of experts is recorded."""

    def __init__(self, source: Path, dtype: Dtype, device: Device, routing_dir: Path | None) -> None:
        config = replace(trainer_config(source, max_context_length=4096), dtype=dtype, device=device)
        self.rank = TrainerRank(replace(config, routing_dir=routing_dir), World(0, 1, torch.device(device)))
        self.rank.create_model(NAME, Trainable(rank=8, seed=1))
        perturb(self.rank, NAME)
        self._chosen: list[Tensor] = []
        for router in _routers(self.rank.base.scorer.model):
            router.register_forward_hook(lambda _, inputs, output: self._chosen.append(output[2]))

    def score(self, drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
        """Return the log probabilities of the sampled tokens, and the experts [L, T, K] that the routers choose."""
        self._chosen.clear()
        output = forward_backward(self.rank, NAME, cross_entropy([drawn.datum]), False)
        assert output is not None
        (row,) = output.loss_fn_outputs
        return row["logprobs"][PROMPT - 1 :], torch.stack(self._chosen).cpu().numpy()


def _routers(model: nn.Module) -> list[nn.Module]:
    found = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    assert found, "the model has no routers that are known here"
    return found


async def draw(
    source: Path, dtype: Dtype, device: Device, num: int, length: int, weights: Path, routing_dir: Path
) -> list[Drawn]:
    """Sample from the saved weights."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 256, PROMPT) for _ in range(num)]
    inputs = [ModelInput(chunks=[EncodedTextChunk(tokens=prompt.astype(np.int32))]) for prompt in prompts]
    with tempfile.TemporaryDirectory() as scratch:
        config = replace(sampler_config(source, Path(scratch)), dtype=dtype, device=device, routing_dir=routing_dir)
        sampler = SamplerPool(config)
        await sampler.start()
        try:
            params: dict[str, Any] = {"max_tokens": length, "stop": []}
            works = [
                sample(sampler, request(one, {**params, "seed": seed}), weights, OWNER)
                for seed, one in enumerate(inputs)
            ]
            responses = await asyncio.gather(*works)
        finally:
            await sampler.stop()
    sequences = [response.sequences[0] for response in responses]
    return [Drawn(p, one.tokens, np.array(one.logprobs)) for p, one in zip(prompts, sequences, strict=True)]


def show(what: str, differences: Sequence[np.ndarray]) -> None:
    every = np.abs(np.concatenate(differences))
    print(f"{what:<44} mean {every.mean():.2g}  max {every.max():.2g} nats, {len(every)} tokens")


def compare(source: Path, scratch: Path, device: Device, num: int, length: int) -> None:
    """Print all figures."""
    for dtype in get_args(Dtype):
        routing_dir, weights = scratch / f"{dtype}-routing", scratch / dtype
        plain, replaying = (Trained(source, dtype, device, directory) for directory in (None, routing_dir))
        plain.rank.save_sampler_weights(NAME, weights, for_elsewhere=False)
        drawn = asyncio.run(draw(source, dtype, device, num, length, weights, routing_dir))
        chosen = [plain.score(one) for one in drawn]
        show(f"{dtype}: trainer - sampler", [a - one.logprobs for (a, _), one in zip(chosen, drawn, strict=True)])
        show(f"{dtype}: trainer - sampler, replayed", [replaying.score(one)[0] - one.logprobs for one in drawn])
        elsewhere = np.concatenate(
            [_elsewhere(own, _sampled(routing_dir, one)) for (_, own), one in zip(chosen, drawn, strict=True)]
        )
        print(f"{dtype}: {elsewhere.mean():.1%} of tokens x layers have other experts in the trainer")


def _sampled(routing_dir: Path, drawn: Drawn) -> np.ndarray:
    """Return the sampler's experts, [L, T, K]."""
    experts_TLK = read_routing(routing_dir, routing_name(OWNER, NAME, Rendered(drawn.token_ids_T[:-1], [], [])))
    assert experts_TLK is not None
    return experts_TLK.transpose(1, 0, 2)


def _elsewhere(one_LTK: np.ndarray, other_LTK: np.ndarray) -> np.ndarray:
    """Return whether the sets of experts differ, by layer and token. `other_LTK` has layers without experts too."""
    other_LTK = other_LTK[len(other_LTK) - len(one_LTK) :]
    is_other: np.ndarray = (np.sort(one_LTK, -1) != np.sort(other_LTK, -1)).any(-1)
    return is_other.ravel()


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
            given.model or make_wide_moe(Path(directory) / "model"),
            Path(directory),
            "cuda" if on_gpu else "cpu",
            given.samples,
            given.tokens,
        )
