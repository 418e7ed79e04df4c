"""Models of the hosted service's layout against transformers and PEFT, which have an adapter of each expert and linear:
log probabilities, and gradients, of a factor that experts share the sum over these.

pytest tests/contract/test_service_against_peft.py
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.factories import cross_entropy, datum, make_renderer, present, prompt, words
from tests.models import FAMILIES
from tests.trainers import (
    assert_same,
    forward_backward,
    gradients,
    lora_model,
    reference_logprobs,
    trained,
    trainer,
)
from tinker_server.api_schemas.adapter_names import expert_stack
from tinker_server.api_schemas.divided_linears import DividedLinear
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.families.lora_names import has_stacked_experts
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.weights import export

KINDS = ("Qwen3 MoE", "Qwen3.5", "Qwen3.5 MoE", "Nemotron-3", "DeepSeek-V3")
LORA = Trainable(rank=4, seed=1, layout="service")


class Expert(nn.Module):
    """One expert's linears, as in the files of the model."""

    def __init__(self, experts: Any, number: int) -> None:
        super().__init__()
        self.act_fn, self.has_gate = experts.act_fn, experts.has_gate
        into = experts.gate_up_proj[number].chunk(2) if self.has_gate else [experts.up_proj[number]]
        names = ("gate_proj", "up_proj") if self.has_gate else ("up_proj",)
        for name, weight in [*zip(names, into, strict=True), ("down_proj", experts.down_proj[number])]:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight.detach().clone())
            self.add_module(name, linear)

    def forward(self, x_TH: Tensor) -> Tensor:
        up_TI = self.get_submodule("up_proj")(x_TH)
        inner_TI = self.act_fn(self.get_submodule("gate_proj")(x_TH)) * up_TI if self.has_gate else self.act_fn(up_TI)
        y_TH: Tensor = self.get_submodule("down_proj")(inner_TI)
        return y_TH


class Experts(nn.Module):
    """A layer's experts, one after the other."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.count = len(experts.down_proj)
        for number in range(self.count):
            self.add_module(str(number), Expert(experts, number))

    def forward(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TH = torch.zeros_like(hidden_TH)
        for number in range(self.count):
            tokens, places = (experts_TK == number).nonzero(as_tuple=True)
            of_expert = self.get_submodule(str(number))(hidden_TH[tokens])
            y_TH = y_TH.index_add(0, tokens, of_expert * weights_TK[tokens, places, None].to(of_expert.dtype))
        return y_TH


def peft_model(source: Path, adapter: Path) -> PeftModel:
    """The base with each expert's linears apart, and the adapter in PEFT's form."""
    is_for_images = "vision_config" in json.loads((source / "config.json").read_text())
    auto = AutoModelForImageTextToText if is_for_images else AutoModelForCausalLM
    base: PreTrainedModel = auto.from_pretrained(source, dtype=torch.float32).eval()
    for name in [name for name, module in base.named_modules() if has_stacked_experts(module)]:
        base.set_submodule(name, Experts(base.get_submodule(name)))
    # By this name PEFT would look for stacked experts, and refuse Mamba's out_proj.
    vars(base.config)["model_type"] = "of linears alone"
    return PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()


def joined(of_peft: Mapping[str, Tensor], wanted: Mapping[str, Tensor], divided: Mapping[str, DividedLinear]) -> Any:
    """PEFT's gradients under the names of a model's tensors: of experts that share a factor summed, else stacked; of
    linears in parts the blocks."""
    experts: dict[str, list[Tensor]] = {}
    found: dict[str, Tensor] = {}
    for name, gradient in of_peft.items():
        parent, last, half, _ = name.rsplit(".", 3)
        if (stack := expert_stack(name)) is not None:
            experts.setdefault(stack[0], []).append(gradient)
        elif last in divided:
            linear = divided[last]
            for part, block in zip(linear.parts, gradient.chunk(len(linear.parts), int(half == "lora_B")), strict=True):
                rows = slice(None) if half == "lora_A" else list(linear.rows(part))
                found[f"{parent}.{part}.{half}.weight"] = block[rows]
        else:
            found[name] = gradient
    for name, each in experts.items():
        stacked = torch.stack(each)
        found[name] = stacked.sum(0, keepdim=True) if len(wanted[name]) == 1 else stacked
    return found


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return FAMILIES[request.param](tmp_path / "model")


def data_for(renderer: Renderer) -> list[Datum]:
    return [datum(prompt(words(length, length)), renderer, length) for length in (5, 17, 40)]


def test_log_probabilities_and_gradients_are_those_of_peft_with_each_adapter_apart(
    source: Path, tmp_path: Path
) -> None:
    rank, renderer = trained(trainer(source), {"m": LORA}), make_renderer(source)
    rank.save_sampler_weights("m", tmp_path / "export" / export.PEFT, for_elsewhere=True)
    export.write_both_forms(tmp_path / "export")
    reference = peft_model(source, tmp_path / "export" / export.PEFT)
    data = data_for(renderer)
    outputs = present(forward_backward(rank, "m", cross_entropy(data))).loss_fn_outputs
    loss = torch.zeros(())
    for item, got in zip(data, outputs, strict=True):
        wanted = reference_logprobs(renderer, item, reference)[:, 0]
        np.testing.assert_allclose(got["logprobs"], wanted.detach().numpy(), atol=1e-4)
        loss = loss - (wanted * torch.from_numpy(item.loss_fn_inputs["weights"])).sum()
    loss.backward()
    of_peft = {
        re.sub(r"\.default\b", "", name): present(parameter.grad) if parameter.grad is not None else 0 * parameter
        for name, parameter in reference.named_parameters()
        if ".lora_" in name
    }
    found = gradients(rank, "m")
    assert_same(found, joined(of_peft, found, lora_model(rank, "m").divided_linears))
