"""LoRA on a mixture's experts equals autograd through merged weights, model by model of one packed microbatch."""

import copy
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from tests.models import make_tiny_moe
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.families.text import Text
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.formats.stacked_adapters import open_adapter
from tinker_server.backends.protocol import ADAPTER_FILE
from tinker_server.backends.trainer.checkpoint_files import write_adapter, write_stacked
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.backends.trainer.lora.files import host_halves
from tinker_server.backends.trainer.lora.linear import ALPHA

CONFIGS = [
    Trainable(rank=8, seed=1),
    Trainable(rank=3, seed=2, train_attn=False, train_unembed=False),
    Trainable(rank=1, seed=3, train_mlp=False),
]
SERVICE = [config.model_copy(update={"layout": "service"}) for config in CONFIGS]
MIXES = {"own": CONFIGS, "service": SERVICE, "both": [CONFIGS[0], SERVICE[1], SERVICE[0]]}
LENGTHS = [9, 5, 7]
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MODULES = Text("Qwen3MoeForCausalLM")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture
def model(source: Path):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, experts_implementation="eager")
    return model.requires_grad_(False).eval()


def made(adapters, config, number):
    """B is not zero here: a fresh adapter adds nothing, and its A has no gradient."""
    adapter = adapters.create(config)
    generator = torch.Generator().manual_seed(number)
    for stack in adapter.stacks:
        stack.b_LrO.data.normal_(0, 0.1, generator=generator)
    return adapter


def merged(model, adapter):
    """The base's weights with the adapter's products added, and the halves of these products."""
    halves = {name: tensor.double().clone().contiguous().requires_grad_() for name, tensor in adapter.tensors.items()}
    weights = dict(model.named_parameters())
    changed: dict[str, torch.Tensor] = {}
    for name in halves:
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        # [O, I], or of all experts [E, O, I]: a shared factor is the same for each.
        delta = ALPHA / adapter.config.rank * halves[name.replace("_A", "_B")] @ halves[name]
        experts, is_expert, rest = module.partition(".experts.")
        if not is_expert:
            changed[f"{module}.weight"] = weights[f"{module}.weight"] + delta
            continue
        number, _, projection = rest.rpartition(".")
        projection = PROJECTIONS.get(projection, projection)
        stack_name = f"{experts}.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"
        stack = changed[stack_name] if stack_name in changed else weights[stack_name]
        rows = {"down_proj": slice(None), "gate_proj": slice(0, 96), "up_proj": slice(96, 192)}[projection]
        whole = torch.zeros_like(stack)
        whole[slice(None) if number == "" else int(number), rows] = delta
        changed[stack_name] = stack + whole
    return weights | changed, halves


@pytest.mark.parametrize("mix", MIXES)
def test_models_of_one_microbatch_get_what_each_gets_alone_from_merged_weights(model, mix) -> None:
    before = copy.deepcopy(model)
    adapters = Adapters(model, MODULES.lora_modules(model), max_rank=8)
    models = [made(adapters, config, number) for number, config in enumerate(MIXES[mix])]
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(10, 300, (length,), generator=generator) for length in LENGTHS]
    scales = adapters.load(models)
    adapters.use(scales[torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    logits = model(input_ids=torch.cat(tokens)[None], position_ids=positions, use_cache=False).logits[0]
    logits.log_softmax(-1)[:, 7].sum().backward()
    adapters.collect(models)
    for adapter, ids, ours in zip(models, tokens, logits.split(LENGTHS), strict=True):
        weights, halves = merged(before, adapter)
        theirs = functional_call(before, weights, kwargs={"input_ids": ids[None], "use_cache": False}).logits[0]
        theirs.log_softmax(-1)[:, 7].sum().backward()
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        assert adapter.gradients.keys() == halves.keys()
        for name, gradient in adapter.gradients.items():
            wanted = halves[name].grad
            torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-11, msg=name)


def test_after_a_mix_of_layouts_each_computes_as_before(model) -> None:
    """The buffers of the other layout are left out, not what a microbatch before has left in them."""
    adapters = Adapters(model, MODULES.lora_modules(model), max_rank=8)
    own, service = (made(adapters, config, 0) for config in (CONFIGS[0], SERVICE[0]))

    def logits(models):
        scales = adapters.load(models)
        adapters.use(scales[torch.zeros(9, dtype=torch.int64)])
        return model(input_ids=torch.arange(10, 19)[None], use_cache=False).logits.detach()

    alone = [logits([own]), logits([service])]
    assert not torch.equal(*alone)
    for models in ([own, service], [service, own]):
        torch.testing.assert_close(logits(models), alone[0 if models[0] is own else 1], rtol=1e-12, atol=1e-12)
    assert torch.equal(logits([own]), alone[0]) and torch.equal(logits([service]), alone[1])


def test_experts_that_share_factors_have_them_once_in_a_layer(model) -> None:
    adapters = Adapters(model, MODULES.lora_modules(model), max_rank=8)
    config = Trainable(rank=2, seed=1, train_attn=False, train_unembed=False, layout="service")
    tensors = adapters.create(config).tensors
    shapes = {name.split(".experts.")[1]: tensor.shape for name, tensor in tensors.items() if ".experts." in name}
    into = {"lora_A.weight": (1, 2, 64), "lora_B.weight": (8, 96, 2)}
    down = {"lora_A.weight": (8, 2, 96), "lora_B.weight": (1, 64, 2)}
    expected = {"w1": into, "w2": down, "w3": into}
    assert shapes == {f"{matrix}.{half}": shape for matrix, of in expected.items() for half, shape in of.items()}
    same, other = (adapters.create(config.model_copy(update={"seed": seed})).tensors for seed in (1, 2))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, same[name]) and (torch.equal(tensor, other[name]) == name.endswith("B.weight"))
        if name.endswith("lora_A.weight"):
            bound = tensor.shape[-1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() < bound
        else:
            assert not tensor.any()
    own_a = tensors["base_model.model.model.layers.1.mlp.experts.w2.lora_A.weight"]
    assert not torch.equal(own_a[0], own_a[1])


def test_layouts_of_a_dense_model_are_the_same_to_the_bit(tiny_text) -> None:
    dense = AutoModelForCausalLM.from_pretrained(tiny_text)
    adapters = Adapters(dense, Text("Qwen3ForCausalLM").lora_modules(dense), max_rank=8)
    own, service = (adapters.create(configs[0]).tensors for configs in (CONFIGS, SERVICE))
    assert own.keys() == service.keys() and all(torch.equal(own[name], service[name]) for name in own)


@pytest.mark.parametrize("layout", ["own", "service"])
@pytest.mark.parametrize("file_bytes", [1, 1 << 24])
def test_for_the_engine_each_matrix_of_a_layers_experts_is_one_tensor(
    model, tmp_path, monkeypatch, file_bytes, layout
) -> None:
    monkeypatch.setattr("tinker_server.backends.formats.stacked_adapters._FILE_BYTES", file_bytes)
    adapter = made(Adapters(model, MODULES.lora_modules(model), max_rank=8), MIXES[layout][0], 0)
    halves = host_halves(adapter.halves(torch.float64), torch.float64)
    stacks = [(targets, *half) for targets, half in zip(adapter.target_modules, halves, strict=True)]
    write_stacked(tmp_path, stacks, adapter.config, "base", LoadCheck([1, 2], [-1.0]))
    with open_adapter(str(tmp_path / ADAPTER_FILE), "pt") as file:
        ours = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - as vLLM reads it
    wanted = {name: tensor for name, tensor in adapter.tensors.items() if ".experts." not in name}
    experts = "base_model.model.model.layers.1.mlp.experts"
    for matrix, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        for half in ("lora_A", "lora_B"):
            stack = f"{experts}.{matrix}.{half}.weight"
            if layout == "own":
                of_each = [adapter.tensors[f"{experts}.{i}.{name}.{half}.weight"] for i in range(8)]
                wanted[stack] = torch.stack(of_each)
            else:
                wanted[stack] = adapter.tensors[stack]
    write_adapter(tmp_path, adapter.tensors, adapter.config, "base", adapter.file_metadata)
    with open_adapter(str(tmp_path / ADAPTER_FILE), "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert layout == "own" or all(torch.equal(saved[name], tensor) for name, tensor in wanted.items())
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())


def test_every_expert_has_its_own_adapter_in_the_files_order_of_layers(model) -> None:
    adapters = Adapters(model, MODULES.lora_modules(model), max_rank=8)
    adapter = adapters.create(Trainable(rank=2, seed=1, train_attn=False, train_unembed=False))
    experts = [name for name in adapter.tensors if ".experts." in name]
    assert len(experts) == 8 * 3 * 2 and all("layers.1." in name for name in experts)
    assert sum("layers.0.mlp." in name for name in adapter.tensors) == 3 * 2
    first = adapter.tensors["base_model.model.model.layers.1.mlp.experts.0.gate_proj.lora_A.weight"]
    other = adapter.tensors["base_model.model.model.layers.1.mlp.experts.1.gate_proj.lora_A.weight"]
    assert first.shape == (2, 64) and not torch.equal(first, other)
