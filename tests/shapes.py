"""Published models by their shapes alone, on the meta device, as the memory plan sees them."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.published import COOKBOOK, OTHERS
from tinker_server.api_schemas.training import Layout as LoraLayout
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import keep_packed, pack_linears, read_size
from tinker_server.backends.configure.fp8_parts import Fp8Parts
from tinker_server.backends.configure.model_size import ModelSize
from tinker_server.backends.families.coverage import decoder_matrices
from tinker_server.backends.families.lora_names import NOT_IN_FP8
from tinker_server.backends.formats.block_fp8 import BLOCK
from tinker_server.backends.model_spec import BasePrecision
from tinker_server.embedded import DIRECTORIES, TINY_VL

_SHORT = {
    "4b": "Qwen/Qwen3-VL-4B-Instruct",
    "32b": "Qwen/Qwen3-VL-32B-Instruct",
    "30b-a3b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "235b-a22b": "Qwen/Qwen3-VL-235B-A22B-Instruct",
    "9b": "Qwen/Qwen3.5-9B",
    "8b-text": "Qwen/Qwen3-8B",
    "70b": "meta-llama/Llama-3.1-70B",
}


@cache
def shape(
    name: str,
    *,
    train_vision: bool = False,
    precision: BasePrecision | None = None,
    lora_layout: LoraLayout = "service",
) -> ModelSize:
    """Return the shapes of a published model, by its name or a short one, on CUDA. Its tokenizer and image processor
    are the small model's. `precision`: as if the decoder were published in it, and stayed so; whether this is served is
    not asked. Raises BackendFailed, as a server would, for one that cannot be served."""
    config = {**COOKBOOK, **OTHERS}[_SHORT.get(name, name)]
    if precision == "fp8":
        block = {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
        config = {**config, "quantization_config": {"quant_method": "fp8", **block}}
    with TemporaryDirectory() as directory:
        for file in Path(DIRECTORIES[TINY_VL]).iterdir():
            if file.suffix in (".json", ".jinja") and "index" not in file.name:
                shutil.copy(file, directory)
        (Path(directory) / "config.json").write_text(json.dumps(config))
        settings = BackendConfig(models={name: name}, train_vision=train_vision, lora_layout=lora_layout)
        if precision == "mxfp4":
            settings = settings.model_copy(update={"base_precision": precision})
        renderer, size = read_size(name, Path(directory), settings, "cuda")
        if precision is None:
            return size
        if precision == "mxfp4":
            text = renderer.config.get_text_config()
            experts, hidden, inner = text.num_local_experts, text.hidden_size, text.intermediate_size
            return keep_packed(size, [(experts, 2 * inner, hidden), (experts, hidden, inner)] * text.num_hidden_layers)
        modules = decoder_matrices(renderer.family, renderer.config, directory).values()
        named = {name: sizes for of_module in modules for name, sizes in of_module.items()}
        kept = tuple(f".{linear}.weight" for linear in NOT_IN_FP8)
        matrices = {name: sizes for name, sizes in named.items() if not name.endswith(kept)}
        return pack_linears(size, Fp8Parts(matrices, renderer.config.get_text_config()))
