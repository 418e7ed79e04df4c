"""A decoder's layers are compiled, those of Mamba2 are not, and linears are merged."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.factories import make_renderer
from tests.models import make_tiny_moe, make_tiny_nemotron_h, make_tiny_qwen3_next
from tests.trainers import trainer
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.families.lora_names import decoder_modules
from tinker_server.backends.trainer.distributed import ALONE
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.backends.trainer.model.compiling import compile_layers, merge_linears, run_text, warm_up
from tinker_server.backends.trainer.model.recompute import Recomputation


@pytest.mark.parametrize(("make", "left"), [(make_tiny_qwen3_next, []), (make_tiny_nemotron_h, ["linear_attention"])])
def test_all_layers_are_compiled_but_those_of_mamba2(make, left, tmp_path):
    """Their code loops over chunks: it would be compiled for every number of them."""
    source = make(tmp_path)
    family = make_renderer(source).family
    decoder = family.model_class.from_pretrained(source).get_decoder()
    compile_layers(decoder.layers)
    is_compiled = [layer._compiled_call_impl is not None for layer in decoder.layers]
    assert is_compiled == [kind not in left for kind in decoder.config.layer_types]
    assert "linear_attention" in decoder.config.layer_types


def test_a_base_without_room_for_long_texts_is_compiled_by_shorter_ones(tiny_text):
    base, seen = trainer(tiny_text).base, []
    layers = Recomputation(base.scorer.model.get_decoder().layers)

    def limited(layer: GradientCheckpointingLayer, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0].shape[1])
        if seen[-1] > 1500 and not layer.gradient_checkpointing:
            raise torch.OutOfMemoryError

    base.scorer.model.get_decoder().layers[1].register_forward_pre_hook(limited)
    warm_up(base.scorer, base.renderer, ALONE, layers, is_coupled=False)
    assert seen == [4001, 2000, 999, 999]  # the last with a gradient and without


def test_ranks_that_wait_for_each_other_compile_layers_that_recompute(tiny_text):
    """One that fails would leave the others waiting. What is compiled so serves layers that do not recompute."""
    base, seen, compiled = trainer(tiny_text).base, [], []
    decoder = base.scorer.model.get_decoder()

    def backend(module, _):
        compiled.append(module)
        return module

    for layer in decoder.layers:
        layer.compile(dynamic=True, backend=backend)
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.gradient_checkpointing))
    warm_up(base.scorer, base.renderer, ALONE, Recomputation(decoder.layers), is_coupled=True)
    assert seen and all(seen) and compiled
    count = len(compiled)
    for with_gradient in (True, False):
        with torch.set_grad_enabled(with_gradient):
            run_text(base.scorer, base.renderer, ALONE, [400, 300])
    assert not any(seen[-4:]) and len(compiled) == count


@pytest.mark.parametrize(("longest", "length"), [(4096, 4001), (4000, 2000), (1024, 999), (100, 249)])
def test_ranks_that_wait_for_each_other_compile_by_a_text_that_they_have_room_for(tiny_text, longest, length):
    """They could not try a shorter one once one of them has failed."""
    base, seen = trainer(tiny_text).base, set()
    layers = base.scorer.model.get_decoder().layers
    layers[0].register_forward_pre_hook(lambda _, args: seen.add(args[0].shape[1]))
    warm_up(base.scorer, base.renderer, ALONE, Recomputation(layers), is_coupled=True, longest=longest)
    assert seen == {length}


def test_linears_of_the_same_input_become_one_and_give_what_they_gave_before(tiny_text):
    model = AutoModelForCausalLM.from_pretrained(tiny_text, dtype=torch.float64).requires_grad_(False).eval()
    adapters = Adapters(model, decoder_modules(model), max_rank=8)
    made = [adapters.create(Trainable(rank=rank, seed=rank)) for rank in (3, 8)]
    for adapter in made:
        for stack in adapter.stacks:
            stack.b_LrO.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    layers = model.get_decoder().layers
    counts = []

    def backend(module, inputs):
        merge_linears(module.graph)
        module.recompile()
        operator = torch.ops.tinker_server.lora_linears.default
        counts.append(len(module.graph.find_nodes(op="call_function", target=operator)))
        return module

    def logits_and_gradients():
        adapters.use(adapters.load(made)[torch.arange(2).repeat_interleave(9)])
        logits = model(input_ids=torch.arange(10, 28)[None], use_cache=False).logits[0]
        logits.log_softmax(-1)[:, 7].sum().backward()
        adapters.collect(made)
        gradients = [parameter.grad for adapter in made for parameter in adapter.parameters]
        for adapter in made:
            for parameter in adapter.parameters:
                parameter.grad = None
        return [logits.detach(), *gradients]

    apart = logits_and_gradients()
    for layer in layers:
        layer.compile(backend=backend)
    merged = logits_and_gradients()
    # Queries, keys and values; the attention's output; gate and up; down.
    assert counts and set(counts) == {4}
    assert all(one.abs().max() > 0 for one in apart)
    torch.testing.assert_close(merged, apart, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layouts", [["service"], ["service", "own"]], ids="+".join)
def test_layers_with_experts_are_compiled_whole_and_give_what_they_gave_before(layouts, tmp_path):
    source = make_tiny_moe(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, experts_implementation="eager")
    model.requires_grad_(False).eval()
    adapters = Adapters(model, decoder_modules(model, experts=True), max_rank=8)
    made = [adapters.create(Trainable(rank=4, seed=1, layout=layout)) for layout in layouts]
    for adapter in made:
        for stack in adapter.stacks:
            stack.b_LrO.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))

    def logits_and_gradients():
        adapters.use(adapters.load(made)[torch.arange(len(made)).repeat_interleave(9)])
        logits = model(input_ids=torch.arange(10, 10 + 9 * len(made))[None], use_cache=False).logits[0]
        logits.log_softmax(-1)[:, 7].sum().backward()
        gradients = [gradient.clone() for gradient in adapters.accumulated]
        return [logits.detach(), *gradients]

    before = logits_and_gradients()
    for layer in model.get_decoder().layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(logits_and_gradients(), before, rtol=1e-10, atol=1e-12)
    assert all(one.abs().max() > 0 for one in before if one.numel())
