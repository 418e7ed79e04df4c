"""Models of the hosted service's layout have as many numbers as the service's own.

The service's are those of `hyperparam_utils` in tinker-cookbook 0.6.1: measured, for a rank of 1.
"""

import pytest
import torch
from transformers import AutoConfig

from api_schemas.training import Trainable
from backends.families.coverage import check_coverage
from backends.families.lora_names import trained_modules
from backends.families.registry import find_family
from backends.protocol import BackendFailed
from backends.trainer.lora.adapters import Adapters
from tests.published import COOKBOOK, NOT_FOUND
from tinker_server.embedded import DIRECTORIES, TINY_VL

COUNTS = {
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (56_598_528, 3_176_448, 156_032),
    "Qwen/Qwen3-30B-A3B": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3-30B-A3B-Base": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3-32B": (5_898_240, 2_490_368, 157_056),
    "Qwen/Qwen3-4B-Instruct-2507": (1_327_104, 737_280, 154_496),
    "Qwen/Qwen3-8B": (1_769_472, 958_464, 156_032),
    "Qwen/Qwen3-8B-Base": (1_769_472, 958_464, 156_032),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (56_598_528, 3_176_448, 156_032),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3.5-27B": (4_325_376, 2_965_504, 253_440),
    "Qwen/Qwen3.5-35B-A3B": (16_281_600, 1_013_760, 250_368),
    "Qwen/Qwen3.5-35B-A3B-Base": (16_281_600, 1_013_760, 250_368),
    "Qwen/Qwen3.5-397B-A17B": (96_030_720, 2_841_600, 252_416),
    "Qwen/Qwen3.5-4B": (1_130_496, 897_024, 250_880),
    "Qwen/Qwen3.5-9B": (1_572_864, 1_130_496, 252_416),
    "Qwen/Qwen3.5-9B-Base": (1_572_864, 1_130_496, 252_416),
    "Qwen/Qwen3.6-27B": (4_325_376, 2_965_504, 253_440),
    "Qwen/Qwen3.6-35B-A3B": (16_281_600, 1_013_760, 250_368),
    "Qwen/Qwen3.8-27B": (4_325_376, 2_965_504, 253_440),
    "deepseek-ai/DeepSeek-V3.1": (94_307_328, 2_440_000, 136_448),
    "deepseek-ai/DeepSeek-V3.1-Base": (94_307_328, 2_440_000, 136_448),
    "deepseek-ai/DeepSeek-V4.1-Flash": (107_673_600, 1_013_760, 134_400),
    "deepseek-ai/DeepSeek-V4.1-Flash-1017": (107_673_600, 1_013_760, 134_400),
    "meta-llama/Llama-3.1-70B": (8_847_360, 4_096_000, 136_448),
    "meta-llama/Llama-3.1-8B": (1_769_472, 851_968, 132_352),
    "meta-llama/Llama-3.1-8B-Instruct": (1_769_472, 851_968, 132_352),
    "meta-llama/Llama-3.2-1B": (491_520, 212_992, 130_304),
    "meta-llama/Llama-3.2-3B": (946_176, 573_440, 131_328),
    "meta-llama/Llama-3.3-70B-Instruct": (8_847_360, 4_096_000, 136_448),
    "moonshotai/Kimi-K2-Thinking": (144_583_680, 1_940_288, 171_008),
    "moonshotai/Kimi-K2.5": (144_583_680, 1_940_288, 171_008),
    "moonshotai/Kimi-K2.6": (144_583_680, 1_940_288, 171_008),
    "moonshotai/Kimi-K3.1-Pro": (766_457_856, 8_040_960, 171_008),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (11_346_176, 584_832, 133_760),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": (11_346_176, 584_832, 133_760),
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16": (111_349_760, 1_675_264, 135_168),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (111_349_760, 1_675_264, 135_168),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (254_529_536, 4_134_912, 139_264),
    "openai/gpt-oss-120b": (40_124_160, 746_496, 203_968),
    "openai/gpt-oss-20b": (6_842_880, 497_664, 203_968),
    "thinkingmachines/Inkling": (154_705_920, 3_424_256, 207_168),
    "thinkingmachines/Inkling-Small": (64_503_808, 1_311_744, 205_120),
    "thinkingmachines/Inkling-2-Small": (128_065_536, 2_347_008, 205_632),
    "zai-org/GLM-5.3": (121_356_288, 2_920_320, 161_024),
    "zai-org/GLM-5.3-Flash": (75_755_520, 2_009_088, 158_976),
}
"""Numbers of mlp, attn and unembed."""
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
SERVED = [name for name in COUNTS if name not in (*NOT_SERVED, *NOT_FOUND)]


def count(name: str) -> tuple[int, int, int]:
    """Count the numbers of a model of rank 1, without memory for the base."""
    fields = {**COOKBOOK[name], **OF_ARCHITECTURE.get(name, {})}
    fields.pop("quantization_config", None)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    family = find_family(config, str(DIRECTORIES[TINY_VL]))  # its image processor suits
    check_coverage(family, config, name)
    with torch.device("meta"):
        model = family.model_class.from_config(config, dtype=torch.bfloat16)
    modules = trained_modules(family, model, train_vision=False)
    made = Adapters(model, modules, max_rank=1).create(Trainable(rank=1, seed=0, layout="service"))
    found = dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), 0)
    for stack in made.stacks:
        found[stack.group.flag] += stack.a_LrI.numel() + stack.b_LrO.numel()
    mlp, attn, unembed = found.values()
    return mlp, attn, unembed


@pytest.mark.parametrize("name", SERVED)
def test_a_model_has_as_many_numbers_as_the_services(name: str) -> None:
    assert count(name) == COUNTS[name]


@pytest.mark.parametrize("name", NOT_SERVED)
def test_other_models_have_no_count_because_they_are_refused(name: str) -> None:
    with pytest.raises((BackendFailed, ValueError), match=NOT_SERVED[name]):
        count(name)
