"""Published models by their shapes alone, on the meta device, as the memory plan sees them."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from backends.config import BackendConfig
from backends.configure.describe import read_size
from backends.configure.model_size import ModelSize
from tests.published import COOKBOOK, OTHERS
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
def shape(name: str, *, train_vision: bool = False) -> ModelSize:
    """Return the shapes of a published model, by its name or a short one, on CUDA. Its tokenizer and image processor
    are the small model's. Raises BackendFailed, as a server would, for one that cannot be served."""
    config = {**COOKBOOK, **OTHERS}[_SHORT.get(name, name)]
    with TemporaryDirectory() as directory:
        for file in Path(DIRECTORIES[TINY_VL]).iterdir():
            if file.suffix in (".json", ".jinja") and "index" not in file.name:
                shutil.copy(file, directory)
        (Path(directory) / "config.json").write_text(json.dumps(config))
        settings = BackendConfig(models={name: name}, train_vision=train_vision)
        return read_size(name, Path(directory), settings, "cuda")[1]
