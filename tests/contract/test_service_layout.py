"""The target modules of the hosted service: adapters of some rows of a linear, and none of others.

pytest tests/contract/test_service_layout.py
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.engines import fork_sampler
from tests.factories import cross_entropy, datum, make_renderer, present, prompt, succeeded, words
from tests.models import (
    DIVIDED,
    FAMILIES,
    make_tiny_deepseek_v3,
    make_tiny_nemotron_h,
    make_tiny_qwen3_5,
    make_tiny_qwen3_next,
)
from tests.ranks import Stepped, check_two_are_as_one, two_steps
from tests.sampling import ATOL, request, sample, sampler_config
from tests.trainers import (
    assert_same,
    config,
    forward_backward,
    gradients,
    logprobs,
    lora_model,
    reference_logprobs,
    together,
    trained,
    trainer,
)
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import Layout, Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora.linear import ALPHA
from tinker_server.backends.trainer.rank import TrainerRank
from tinker_server.weights import export

KINDS: dict[str, Callable[[Path], Path]] = {
    "Qwen3.5": make_tiny_qwen3_5,
    "Qwen3-Next": make_tiny_qwen3_next,
    "Nemotron-H": make_tiny_nemotron_h,
    "DeepSeek-V3": make_tiny_deepseek_v3,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR_ATTENTION = ["in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "out_proj"]
TRAINED = {
    "Qwen3.5": [*LINEAR_ATTENTION, *ATTENTION],
    "Qwen3-Next": [*LINEAR_ATTENTION, *ATTENTION],
    "Nemotron-H": ["gate_proj", "x_proj", "out_proj", *ATTENTION],
    "DeepSeek-V3": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"],
}
"""What the service trains as attention."""
ADAPTERS = {
    "service": Trainable(rank=4, seed=1, train_mlp=False, layout="service"),
    "attention": Trainable(rank=3, seed=2, train_mlp=False, train_unembed=False, layout="service"),
    "own": Trainable(rank=2, seed=3, train_mlp=False),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def source(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[kind](tmp_path_factory.mktemp("service") / "model")


def data_for(renderer: Renderer, seed: int) -> list[Datum]:
    return [datum(prompt(words(length, seed + length)), renderer, seed + length) for length in (5, 11)]


def fused_rows(layer: Any, name: str) -> tuple[str, Tensor] | None:
    """Return the linear that an adapter is of a part of, and its rows, by the names of transformers' layers."""
    part = name.rpartition(".")[2]
    if hasattr(layer, "in_proj_qkv") and part in ("in_proj_q", "in_proj_k", "in_proj_v"):
        sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
        return "in_proj_qkv", torch.arange(sum(sizes)).split(sizes)["qkv".index(part[-1])]
    if hasattr(layer, "in_proj_qkvz") and part in ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"):
        values = layer.value_dim // layer.num_k_heads
        sizes = [layer.head_k_dim, layer.head_k_dim, values, values]
        by_head = torch.arange(layer.in_proj_qkvz.out_features).view(layer.num_k_heads, -1)
        return "in_proj_qkvz", by_head.split(sizes, 1)["qkvz".index(part[-1])].flatten()
    if hasattr(layer, "conv1d") and part in ("gate_proj", "x_proj"):
        first = 0 if part == "gate_proj" else layer.intermediate_size
        return "in_proj", torch.arange(first, first + layer.intermediate_size)
    return None


class Reference:
    """transformers with an adapter's products added to its weights."""

    def __init__(self, source: Path, renderer: Renderer, adapter: Mapping[str, Tensor], rank: int) -> None:
        auto = AutoModelForImageTextToText if renderer.takes_images else AutoModelForCausalLM
        self.model = auto.from_pretrained(source).eval()
        self.halves = {name: tensor.clone().contiguous().requires_grad_() for name, tensor in adapter.items()}
        self._weights = dict(self.model.named_parameters())
        for name in [name for name in self.halves if ".lora_A." in name]:
            self._add(name, ALPHA / rank * self.halves[name.replace("lora_A", "lora_B")] @ self.halves[name])
        self.config = self.model.config
        self.dtype = self.model.dtype

    def _add(self, name: str, delta: Tensor) -> None:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        parent = module.rpartition(".")[0]
        found = fused_rows(self.model.get_submodule(parent), module)
        linear, rows = (module, torch.arange(len(delta))) if found is None else (f"{parent}.{found[0]}", found[1])
        weight = f"{linear}.weight"
        self._weights[weight] = self._weights[weight].index_add(0, rows, delta)

    def __call__(self, **inputs: Any) -> Any:
        return functional_call(self.model, self._weights, kwargs=inputs)


def test_the_services_modules_are_trained_and_no_others(kind: str, source: Path) -> None:
    rank = trainer(source)
    rank.create_model("m", ADAPTERS["attention"])
    assert {name.split(".")[-3] for name in lora_model(rank, "m").tensors} == set(TRAINED[kind])


def test_models_of_both_layouts_train_in_one_microbatch_as_each_by_merged_weights(source: Path) -> None:
    rank, renderer = trained(trainer(source), ADAPTERS), make_renderer(source)
    data = {name: data_for(renderer, 10 * place) for place, name in enumerate(ADAPTERS)}
    for names in (["service", "attention"], ["own"], ["own", "attention", "service"], ["service"]):
        for name in names:
            lora_model(rank, name).clear_gradient()
        outputs = together(rank, [(name, cross_entropy(data[name])) for name in names])
        for name, output in zip(names, outputs, strict=True):
            reference = Reference(source, renderer, lora_model(rank, name).tensors, ADAPTERS[name].rank)
            loss = torch.zeros(())
            for item, got in zip(data[name], succeeded(output).loss_fn_outputs, strict=True):
                wanted = reference_logprobs(renderer, item, reference)[:, 0]
                np.testing.assert_allclose(got["logprobs"], wanted.detach().numpy(), atol=1e-4)
                loss = loss - (wanted * torch.from_numpy(item.loss_fn_inputs["weights"])).sum()
            loss.backward()
            wanted_gradients = {name: half.grad for name, half in reference.halves.items() if half.grad is not None}
            assert_same(gradients(rank, name), wanted_gradients)


def own_gradients(source: Path, others: Mapping[str, Trainable]) -> Mapping[str, Tensor]:
    """Return the gradients of a model of the own layout, after a microbatch of `others`."""
    rank, renderer = trained(trainer(source), {"own": ADAPTERS["own"], **others}), make_renderer(source)
    for name in others:
        forward_backward(rank, name, cross_entropy(data_for(renderer, 5)))
    forward_backward(rank, "own", cross_entropy(data_for(renderer, 0)))
    return gradients(rank, "own")


def test_a_microbatch_of_the_service_changes_no_bit_of_a_later_model_of_the_own_layout(source: Path) -> None:
    alone, after = own_gradients(source, {}), own_gradients(source, {"service": ADAPTERS["service"]})
    assert alone.keys() == after.keys() and all(alone[name].equal(after[name]) for name in alone)


def test_a_state_of_the_services_modules_is_loaded_with_its_optimizer(source: Path, tmp_path: Path) -> None:
    rank, renderer = trained(trainer(source), {"m": ADAPTERS["service"]}), make_renderer(source)
    first = two_steps(rank, "m", cross_entropy(data_for(renderer, 0)))
    rank.save_state("m", tmp_path / "state")
    rank.create_model("n", ADAPTERS["service"])
    rank.load_state("n", tmp_path / "state", with_optimizer=True)
    loaded = lora_model(rank, "n")
    assert all(tensor.equal(loaded.tensors[name]) for name, tensor in lora_model(rank, "m").tensors.items())
    again = [two_steps(rank, name, cross_entropy(data_for(renderer, 3))) for name in ("m", "n")]
    assert first and str(again[0]) == str(again[1])


def on_ranks(world: World, source: Path) -> Stepped:
    """Outputs of two steps, and the adapter after them, of rank 0."""
    rank = TrainerRank(config(source, 60, num_ranks=world.size), world)
    rank.create_model("m", Trainable(rank=8, seed=1, train_mlp=False, layout="service"))
    return two_steps(rank, "m", cross_entropy(data_for(make_renderer(source), 0)))


@pytest.mark.slow
def test_two_ranks_are_as_one(source: Path) -> None:
    check_two_are_as_one(on_ranks, source)


MIXTURES = (
    "gpt-oss",
    "DeepSeek-V3",
    "Qwen3-Next",
    "Qwen3-VL MoE",
    "Qwen3-VL MoE, heads of keys repeated",
    "Nemotron-3",
    "Qwen3.5 MoE",
)
IN_ENGINE = ("Qwen3 MoE", "Qwen3.5", "Qwen3.5 MoE", "Nemotron-3", "DeepSeek-V3", "gpt-oss")
WITHOUT_EXPERTS: Mapping[Layout, tuple[str, ...]] = {"own": ("attention",), "service": ("attention", "own")}
"""Models that train none, so that slots of each form take them."""


ENGINES: list[tuple[str, Layout, int]] = [
    *((family, slots, 1) for family in IN_ENGINE for slots in get_args(Layout)),
    ("Qwen3-Next", "service", 1),
    *((family, "service", num_ranks) for family, (_, num_ranks) in DIVIDED.items() if family in MIXTURES),
    ("Qwen3.5 MoE", "own", 2),
]
"""Kinds of models, forms of slots, and numbers of ranks, each of which has the factors whole that experts share."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "slots", "num_ranks"), ENGINES)
async def test_the_engine_scores_the_services_modules_as_the_trainer(
    family: str, slots: Layout, num_ranks: int, tmp_path: Path
) -> None:
    make = FAMILIES[family] if num_ranks == 1 else DIVIDED[family][0]
    source = make(tmp_path / "model")
    renderer = make_renderer(source)
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if renderer.family.needs_bfloat16_on_cpu else "float32"
    models = {
        name: lora.model_copy(update={"train_mlp": name not in WITHOUT_EXPERTS[slots]})
        for name, lora in ADAPTERS.items()
    }
    rank = trained(trainer(source, dtype=dtype), models)
    for name in models:
        rank.save_sampler_weights(name, tmp_path / name, for_elsewhere=False)
        rank.save_sampler_weights(name, tmp_path / f"{name}-export" / export.PEFT, for_elsewhere=True)
        export.write_both_forms(tmp_path / f"{name}-export")
    directories = [(name, tmp_path / f"{name}{form}") for name in models for form in ("", f"-export/{export.PEFT}")]
    spec = replace(sampler_config(source, tmp_path / "scratch"), dtype=dtype, expert_slots=slots)
    running = SamplerPool(replace(spec, tensor_parallel=num_ranks), fork_sampler)
    await running.start()
    try:
        differences = []
        for (name, directory), item in product(directories, data_for(renderer, 3)):
            asked = request(item.model_input, {"max_tokens": 1}, prompt_logprobs=True)
            response = await sample(running, asked, directory)
            ids = renderer.render(item.model_input, "datum").token_ids_T
            inputs = {"target_tokens": np.append(ids[1:], 0), "weights": np.ones(len(ids), np.float32)}
            (expected,) = logprobs(rank, [Datum(model_input=item.model_input, loss_fn_inputs=inputs)], name)
            got = np.array(present(response.prompt_logprobs)[1:])
            differences.append(np.abs(got - expected[:-1]))
    finally:
        await running.stop()
    both = np.concatenate(differences)
    assert both.max() < ATOL if dtype == "float32" else both.mean() < 0.03 and both.max() < 0.25
