"""Models of the hosted service's layout have as many numbers as the service's own."""

import pytest
import torch
from transformers import AutoConfig

from tests.published import COOKBOOK, NOT_FOUND, SERVICE_COUNTS
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.families.coverage import check_coverage
from tinker_server.backends.families.lora_names import find_trained_modules
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.embedded import DIRECTORIES, TINY_VL

NOT_SERVED = {
    "deepseek-ai/DeepSeek-V4.1-Flash": "Unrecognized model identifier: deepseek_v41",
    "deepseek-ai/DeepSeek-V4.1-Flash-1017": "Unrecognized model identifier: deepseek_v41",
    "moonshotai/Kimi-K2.5": "KimiK25ForConditionalGeneration",
    "moonshotai/Kimi-K2.6": "KimiK25ForConditionalGeneration",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "moe_latent_size",
    "thinkingmachines/Inkling": "InklingForConditionalGeneration",
    "thinkingmachines/Inkling-Small": "InklingForConditionalGeneration",
    "zai-org/GLM-5.3": "GlmMoeDsaForCausalLM",
    "zai-org/GLM-5.3-Flash": "Glm5NextForConditionalGeneration",
}
"""Models that have no count here, and what the refusal names."""
OF_ARCHITECTURE = {
    "moonshotai/Kimi-K2-Thinking": {
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
}
"""Fields in place of those that the config has for Moonshot's own class."""
SERVED = [name for name in SERVICE_COUNTS if name not in (*NOT_SERVED, *NOT_FOUND)]


def count(name: str) -> tuple[int, int, int]:
    """Count the numbers of a model of rank 1, without memory for the base."""
    fields = {**COOKBOOK[name], **OF_ARCHITECTURE.get(name, {})}
    fields.pop("quantization_config", None)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    family = find_family(config, str(DIRECTORIES[TINY_VL]))  # its image processor suits
    check_coverage(family, config, name)
    with torch.device("meta"):
        model = family.model_class.from_config(config, dtype=torch.bfloat16)
    modules = find_trained_modules(family, model, train_vision=False)
    made = Adapters(model, modules, max_rank=1).create(Trainable(rank=1, seed=0, layout="service"))
    found = dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), 0)
    for stack in made.stacks:
        found[stack.group.flag] += stack.a_LrI.numel() + stack.b_LrO.numel()
    mlp, attn, unembed = found.values()
    return mlp, attn, unembed


@pytest.mark.parametrize("name", SERVED)
def test_a_model_has_as_many_numbers_as_the_services(name: str) -> None:
    assert count(name) == SERVICE_COUNTS[name]


@pytest.mark.parametrize("name", NOT_SERVED)
def test_other_models_have_no_count_because_they_are_refused(name: str) -> None:
    with pytest.raises((BackendFailed, ValueError), match=NOT_SERVED[name]):
        count(name)
