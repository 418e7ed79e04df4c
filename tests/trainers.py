"""A trainer's rank in the test's own process, and transformers as its reference."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tests.factories import cross_entropy, present
from tests.specs import tiny_spec
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import AdamParams, ForwardBackwardOutput, Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import Mesh, ModelSpec
from tinker_server.backends.protocol import EncodedBatch
from tinker_server.backends.trainer import commands
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.rank import TrainerRank

LORA = Trainable(rank=8, seed=1)
# Adam's first step is nearly the sign of the gradient, which blows rounding up; a large eps makes it
# nearly the gradient itself.
SMOOTH = AdamParams(learning_rate=0.1, eps=1.0)


def config(
    source: Path, max_tokens: int = 1024, max_context_length: int = 1024, num_ranks: int = 1, num_slices: int = 1
) -> ModelSpec:
    """Several ranks share the base, and so many of them compute slices of a microbatch."""
    return replace(
        tiny_spec(source),
        max_tokens_per_microbatch=max_tokens,
        max_context_length=max_context_length,
        mesh=Mesh(shard=num_ranks, context=num_slices),
    )


def trainer(
    source: Path, max_tokens: int = 1024, device: Literal["cpu", "cuda"] = "cpu", **changes: Any
) -> TrainerRank:
    """A world of its own, on the first device of its kind; `changes` of the spec."""
    settings = replace(config(source, max_tokens), device=device, **changes)
    return TrainerRank(settings, World(0, 1, torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")))


def trained(rank: TrainerRank, adapters: Mapping[str, Trainable]) -> TrainerRank:
    """With models whose adapters are off their start."""
    for name, lora in adapters.items():
        rank.create_model(name, lora)
        perturb(rank, name)
    return rank


_numbers = itertools.count()
OWNER = "somebody"


def forward_backward(
    rank: TrainerRank, model_id: str, batch: EncodedBatch, backward: bool = True
) -> ForwardBackwardOutput | None:
    """Return the output on rank 0, None on the others."""
    (outcome,) = together(rank, [(model_id, batch)], backward)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def together(
    rank: TrainerRank, batches: Sequence[tuple[str, EncodedBatch]], backward: bool = True
) -> list[ForwardBackwardOutput | Exception | None]:
    """Run requests of several models in common microbatches, as they come."""
    new = [commands.NewRequest(next(_numbers), model_id, OWNER, batch, backward) for model_id, batch in batches]
    left = [one.number for one in new]
    finished: dict[int, ForwardBackwardOutput | Exception] = {}
    arriving: list[commands.NewRequest] = new
    while left:
        finished |= dict(rank.compute_microbatch(arriving, left).finished)
        arriving = []
        left = [number for number in left if number in rank._requests]
    return [finished.get(one.number) for one in new]


def logprobs(rank: TrainerRank, data: list[Datum], model_id: str = "m") -> list[np.ndarray]:
    output = forward_backward(rank, model_id, cross_entropy(data), False)
    return [one["logprobs"] for one in present(output).loss_fn_outputs]


def reference_inputs(renderer: Renderer, model_input, model) -> dict[str, torch.Tensor]:
    """One unpacked sample as the processor would give it; transformers finds the positions itself."""
    rendered = renderer.render(model_input, "datum")
    ids = torch.from_numpy(rendered.token_ids_T)[None]
    if not rendered.images:
        return {"input_ids": ids}
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.cat([one.tensors["pixel_values"] for one in rendered.images]).to(model.dtype),
    }
    tensors = rendered.images[0].tensors
    if "pixel_attention_mask" in tensors:  # a sample's tiles in a dimension of their own
        return {**inputs, "pixel_values": inputs["pixel_values"][None]}
    if model.config.model_type == "gemma3":
        return {**inputs, "token_type_ids": (ids == model.config.image_token_id).int()}
    if "image_grid_thw" not in tensors:
        return inputs
    return {
        **inputs,
        "image_grid_thw": torch.cat([one.tensors["image_grid_thw"] for one in rendered.images]),
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),
    }


def reference_logprobs(renderer: Renderer, item: Datum, model) -> torch.Tensor:
    logits = model(**reference_inputs(renderer, item.model_input, model), use_cache=False).logits[0]
    targets = torch.from_numpy(item.loss_fn_inputs["target_tokens"]).reshape(len(logits), -1)
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, targets)
    return logprobs


def lora_model(rank: TrainerRank, model_id: str) -> LoraModel:
    return rank.models[model_id]


def perturb(rank: TrainerRank, model_id: str) -> None:
    """Give B random values: a fresh adapter adds nothing and would prove nothing. Several ranks call it together."""
    generator = torch.Generator().manual_seed(7)
    model = lora_model(rank, model_id)
    weights = model.masters()
    names = [name for name in model.tensors if ".lora_B." in name]
    weights |= {name: torch.empty(model.tensors[name].shape).normal_(0, 0.05, generator=generator) for name in names}
    model.take(model.prepare_state(weights, {}))


def gradients(rank: TrainerRank, model_id: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in lora_model(rank, model_id).gradients.items()}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float = 1e-4) -> None:
    """Equal to a fraction of each tensor's largest entry."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = tensor.abs().max().item()
        assert (got[name] - tensor).abs().max().item() <= rtol * scale + 1e-7, name


def assert_same_gradients(
    got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float = 1e-5, noise: float = 1e-6
) -> None:
    """To rounding of each tensor, or `noise` of the model's largest number: the gradient of a one-token sample's query
    is rounding alone."""
    assert got.keys() == wanted.keys()
    largest = max(tensor.abs().max().item() for tensor in wanted.values())
    for name, tensor in wanted.items():
        error = (got[name] - tensor).abs().max().item()
        assert error <= rtol * tensor.abs().max().item() + noise * largest, name


def relative_distance(got: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> float:
    """L2 norm of the difference, as a fraction of what is wanted."""
    flat_got, flat_wanted = (torch.cat([tensor.detach().flatten() for tensor in side]) for side in (got, wanted))
    distance: float = ((flat_got - flat_wanted).norm() / flat_wanted.norm()).item()
    return distance
