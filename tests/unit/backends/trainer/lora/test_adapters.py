"""Our LoRA layers equal PEFT's, model by model: in one packed microbatch all get what they get alone."""

import copy

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft.tuners.lora import LoraModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.factories import present
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.families.logits import LogitTransform
from tinker_server.backends.families.lora_names import decoder_modules
from tinker_server.backends.trainer.lora.adapters import Adapters, Buffers
from tinker_server.backends.trainer.lora.linear import ALPHA
from tinker_server.backends.trainer.model import token_logprobs

CONFIGS = [
    Trainable(rank=8, seed=1),
    Trainable(rank=3, seed=2, train_unembed=False),
    Trainable(rank=1, seed=3, train_attn=False),
]


@pytest.fixture
def model(tiny_text):
    return AutoModelForCausalLM.from_pretrained(tiny_text, dtype=torch.float64).requires_grad_(False).eval()


def perturbed(adapter, seed):
    """B is not zero here: a fresh adapter adds nothing, and its A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    for stack in adapter.stacks:
        stack.b_LrO.data.normal_(0, 0.1, generator=generator)
    return adapter


def peft_of(model, config, adapter):
    """PEFT's model with the same adapter, and its parameters by name."""
    names = [n for flag, modules in decoder_modules(model).items() if getattr(config, flag) for n in modules]
    peft = copy.deepcopy(model)
    LoraModel(peft, PeftLoraConfig(r=config.rank, lora_alpha=ALPHA, target_modules=names), "one")
    parameters = {}
    for name, parameter in peft.named_parameters():
        if ".one." in name:
            own = f"base_model.model.{name.replace('.one.', '.')}"
            parameter.data = adapter.tensors[own].to(torch.float64).clone().contiguous()
            parameters[own] = parameter
    return peft, parameters


def test_models_of_one_microbatch_get_what_peft_gives_each_alone(model):
    before = copy.deepcopy(model)
    adapters = Adapters(model, decoder_modules(model), max_rank=8)
    made = [perturbed(adapters.create(config), seed) for seed, config in enumerate(CONFIGS)]
    tokens = [
        torch.randint(10, 300, (length,), generator=torch.Generator().manual_seed(length)) for length in (9, 5, 7)
    ]
    scales = adapters.load(made)
    owners = torch.arange(3).repeat_interleave(torch.tensor([9, 5, 7]))
    adapters.use(scales[owners])
    positions = torch.cat([torch.arange(len(ids)) for ids in tokens])[None]
    logits = model(input_ids=torch.cat(tokens)[None], position_ids=positions, use_cache=False).logits[0]
    logits.log_softmax(-1)[:, 7].sum().backward()
    adapters.collect(made)
    for config, adapter, ids, ours in zip(CONFIGS, made, tokens, logits.split([9, 5, 7]), strict=True):
        peft, parameters = peft_of(before, config, adapter)
        theirs = peft(input_ids=ids[None], use_cache=False).logits[0]
        theirs.log_softmax(-1)[:, 7].sum().backward()
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert adapter.gradients.keys() == parameters.keys()
        for name, gradient in adapter.gradients.items():
            torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-9, atol=1e-12)


def test_buffers_of_each_summed_rank_begin_at_the_same_addresses_on_a_gpu(model):
    """Compiled code and graphs hold them; and memory is taken once."""
    adapters = Adapters(model, decoder_modules(model), max_rank=8, summed_rank=24)
    adapters._largest_width = 32  # as on a GPU
    made = [perturbed(adapters.create(config), seed) for seed, config in enumerate(CONFIGS)]
    found = []
    for models in (made[:1], made, made[2:]):
        adapters.load(models)
        buffers = [tensor for buffers in adapters._loaded for tensor in buffers._all()]
        assert all(tensor.is_contiguous() for tensor in buffers)
        found.append([tensor.data_ptr() for tensor in buffers])
    assert found[0] == found[1] == found[2]
    assert {buffers.width for buffers in adapters._buffers.values()} == {32}


def test_a_model_of_several_requests_is_loaded_once(model):
    adapters = Adapters(model, decoder_modules(model), max_rank=8)
    first, other = (adapters.create(config) for config in CONFIGS[:2])
    scales = adapters.load([first, other, first])
    assert scales.shape == (3, 8 + 3)
    assert torch.equal(scales[0], scales[2]) and not torch.equal(scales[0], scales[1])
    for gradient in adapters.accumulated:
        gradient.fill_(1)
    adapters.collect([first, other, first])
    assert all(float(present(parameter.grad).max()) == 1 for made in (first, other) for parameter in made.parameters)


def test_buffers_for_which_there_is_no_memory_leave_none_behind(model, monkeypatch):
    adapters = Adapters(model, decoder_modules(model), max_rank=8)
    small, large = (adapters.create(config) for config in (CONFIGS[2], CONFIGS[0]))
    adapters.load([small])
    zeros, made = Buffers.zeros, []

    def fail_at_the_third(*given):
        made.append(given)
        if len(made) == 3:
            raise torch.OutOfMemoryError
        return zeros(*given)

    before = dict(adapters._buffers)
    monkeypatch.setattr(Buffers, "zeros", fail_at_the_third)
    with pytest.raises(torch.OutOfMemoryError):
        adapters.load([large])
    assert len(made) == 3
    assert adapters._buffers == before


def test_an_adapter_that_overflows_does_not_change_its_batch_mates(model):
    adapters = Adapters(model, decoder_modules(model), max_rank=8)
    # On the head alone: this attention computes all pairs of tokens, which the trainer's does not.
    head = Trainable(rank=3, seed=2, train_attn=False, train_mlp=False)
    good, bad = (perturbed(adapters.create(config), 0) for config in (CONFIGS[0], head))
    ids = torch.arange(10, 30)
    positions = torch.cat([torch.arange(10)] * 2)[None]

    def logits_of_first(*models):
        scales = adapters.load(models)
        adapters.use(scales[torch.arange(2).clamp(max=len(models) - 1).repeat_interleave(10)])
        return model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0, :10].detach()

    with_equal = logits_of_first(good, bad)
    for stack in bad.stacks:
        stack.a_LrI.data.fill_(1e300)
        stack.b_LrO.data.fill_(1e300)
    torch.testing.assert_close(logits_of_first(good, bad), with_equal, rtol=0, atol=0)


def transformed(logits_TV: Tensor, transform: LogitTransform) -> Tensor:
    """As transformers writes it (Gemma 2, Cohere)."""
    capped = logits_TV if transform.cap is None else transform.cap * torch.tanh(logits_TV / transform.cap)
    return transform.scale * capped


@pytest.mark.parametrize(
    "transform", [LogitTransform(), LogitTransform(cap=0.8), LogitTransform(0.3), LogitTransform(2.0, 1.5)]
)
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(("limit", "length"), [(7 * 384, 20), (2**26, 20), (11 * 384, 50)])
def test_the_heads_log_probabilities_and_gradients_are_those_of_autograd(
    model, limit, length, is_known, transform, monkeypatch
):
    monkeypatch.setattr(token_logprobs, "MAX_LOGITS", limit)
    monkeypatch.setattr(token_logprobs, "MANY_TOKENS", 50)
    adapters = Adapters(model, decoder_modules(model), max_rank=8)
    made = perturbed(adapters.create(CONFIGS[0]), 0)
    scales_TR = adapters.load([made]).expand(length, -1)
    head = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(length, head.weight.shape[1], generator=generator, dtype=torch.float64, requires_grad=True)
    targets_TK = torch.randint(0, head.weight.shape[0], (length, 3), generator=generator)
    targets_TK[1, 2], targets_TK[2] = targets_TK[1, 0], targets_TK[2, 1]
    weights_TK = torch.randn(length, 3, generator=generator, dtype=torch.float64)

    def gradient(logprobs_TK, begin):
        return weights_TK[begin : begin + len(logprobs_TK)]

    known = gradient if is_known else None
    ours_TK = token_logprobs.target_logprobs(hidden_TH, head, scales_TR, targets_TK, known, transform)
    (ours_TK * weights_TK).sum().backward()
    adapters.collect([made])
    gradient_TH, hidden_TH.grad = hidden_TH.grad, None

    stack = next(stack for stack in made.stacks if stack.group.flag == "train_unembed")
    a_rI, b_rO = (half.data[0].clone().requires_grad_() for half in (stack.a_LrI, stack.b_LrO))
    logits_TV = hidden_TH @ head.weight.T + ALPHA / 8 * (hidden_TH @ a_rI.T) @ b_rO
    theirs_TK = transformed(logits_TV, transform).log_softmax(-1).gather(-1, targets_TK)
    (theirs_TK * weights_TK).sum().backward()
    for ours, theirs in (
        (ours_TK, theirs_TK),
        (gradient_TH, hidden_TH.grad),
        (stack.a_LrI.grad[0], a_rI.grad),
        (stack.b_LrO.grad[0], b_rO.grad),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_another_gradient_than_was_promised_gives_nan(model):
    adapters = Adapters(model, decoder_modules(model), max_rank=8)
    made = perturbed(adapters.create(CONFIGS[0]), 0)
    scales_TR = adapters.load([made]).expand(3, -1)
    head = model.get_output_embeddings()
    hidden_TH = torch.ones(3, head.weight.shape[1], dtype=torch.float64, requires_grad=True)
    targets_T1 = torch.arange(3)[:, None]
    logprobs_T1 = token_logprobs.target_logprobs(
        hidden_TH, head, scales_TR, targets_T1, lambda one, begin: -torch.ones_like(one)
    )
    logprobs_T1.backward(torch.tensor([[-1.0], [-1.1], [-1.0]]).double())
    assert present(hidden_TH.grad).isfinite().all(-1).tolist() == [True, False, True]
