"""Writes docs/models.md from the families themselves: `make models`. A test holds the page to what this gives.

Every line is of a tiny model of the kind, the one that tests/contract/test_families.py trains and samples.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig

from backends.families.coverage import check_coverage
from backends.families.registry import find_family
from backends.protocol import BackendFailed
from tests.models import (
    FAMILIES,
    make_tiny_internvl,
    make_tiny_moe,
    make_tiny_of,
    make_tiny_qwen2_5_vl,
    make_tiny_qwen3_5,
    make_tiny_qwen3_next,
    make_tiny_smolvlm,
    make_tiny_text,
    make_tiny_vl,
)

PAGE = Path(__file__).parents[1] / "docs/models.md"
SERVED: dict[str, Callable[[Path], Path]] = {
    "Qwen3-VL": make_tiny_vl,
    "Qwen3-VL MoE": partial(make_tiny_vl, moe=True),
    "Qwen2.5-VL": make_tiny_qwen2_5_vl,
    "InternVL": make_tiny_internvl,
    "SmolVLM2": make_tiny_smolvlm,
    "Qwen3.5": make_tiny_qwen3_5,
    "Qwen3.5 MoE": partial(make_tiny_qwen3_5, moe=True),
    "Qwen3": make_tiny_text,
    "Qwen3 MoE": make_tiny_moe,
    "Qwen3-Next": make_tiny_qwen3_next,
    "Qwen2 MoE": FAMILIES["Qwen2 MoE"],
    "Mixtral": FAMILIES["Mixtral"],
    "Llama": partial(make_tiny_of, "llama"),
    "Mistral": FAMILIES["Mistral"],
    "Gemma 3 (text)": FAMILIES["Gemma 3"],
    "Gemma 2": FAMILIES["Gemma 2"],
    "Granite": FAMILIES["Granite"],
    "gpt-oss": FAMILIES["gpt-oss"],
}
"""Those whose sampler is compared with their trainer."""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
REFUSED = {
    "Gemma 3 with images": ("gemma3", "Gemma3ForConditionalGeneration"),
    "LFM2": ("lfm2", "Lfm2ForCausalLM"),
    "Falcon-H1": ("falcon_h1", "FalconH1ForCausalLM"),
}
HEAD = """# Models

Made by `make models`; a test holds this page to what the server says. A kind that is not below is refused at start by
name, unless it is a dense text decoder of transformers. The start then checks that LoRA reaches every weight of it, and
that the trainer's scores equal the model's own.

Each kind below is trained and sampled in the tests as a random model of about 0.3 M parameters: trainer = transformers,
packed = alone, saved weights merged into transformers = trainer, sampler = trainer with adapters and images, to 1e-4
nats in float32 (the sampler of Qwen3.5 and Qwen3-Next: bfloat16, 0.03 in the mean and 0.2 at most). Figures
of larger models are in docs/performance.md.

| kind | architecture | images | experts | `train_attn` | `train_mlp` | `train_unembed` | frozen |
|---|---|---|---|---|---|---|---|
"""
NOTES = """
- Video and audio are refused for every kind.
- `model.visual` is frozen by default. A server started with `--train-vision` trains its linears and its mergers';
  the embedding of patches stays frozen. Trainer and engine agree on it for the kinds that have it.
- An expert's three matrices have adapters of their own, each of the full rank: a model of rank r has r x experts x
  layers x 3 pairs. Routers and the gates of shared experts are frozen.
- Samples of all kinds share packed microbatches. Layers of linear attention begin anew at each sample; they are neither
  compiled nor part of CUDA graphs yet, and run by transformers' equations in torch.
- Exported weights: tinker names, `mlp.experts.w1`, `w3`, `w2` as stacks over experts; saved for PEFT and vLLM under the
  names of the model's own files, expert by expert. The cookbook's tools build and merge them, except Mixtral's, whose
  files have other names (`block_sparse_moe.experts.0.w1`). PEFT 0.21 reads those of Qwen3 MoE and Mixtral; for
  other kinds with experts, and layers without experts among them, it silently omits a part: merge those.
- InternVL in transformers' own form (`-hf`), with a dense decoder. Its image is up to 12 tiles and one of the whole,
  between `<img>` and `</img>`. SmolVLM's is tiles too, with their positions as text and `<fake_token_around_image>`.
  The first SmolVLM (`Idefics3ForConditionalGeneration`) is served like SmolVLM2, by the same class of the engine; the
  tests compare only its trainer with transformers. On CUDA InternVL's engine has run, and SmolVLM's has not yet.
- Qwen3.5's `in_proj_qkv` is exported whole, not in the vendor's three parts; so is Qwen3-Next's `in_proj_qkvz`.
- On the CPU vLLM 0.32 has no kernel for experts with adapters; the server brings a plain one. Linear attention is in
  bfloat16 alone there. On an H200, mean and largest difference in bfloat16: the trainer's experts from the CPU's 0.015
  nats, Qwen3-Next's 0.017 and 0.17; the engine from the trainer 0.010 and 0.054 (Qwen3 MoE), 0.006 and 0.035 (Qwen3-VL
  MoE), 0.013 and 0.058 (Qwen3.5), 0.016 and 0.081 (Qwen3.5 MoE); at most 0.014 and 0.052 where towers are trained
  (Qwen3-VL, its MoE, Qwen2.5-VL), 0.010 and 0.032 where all weights are.
- The shape of Qwen3-VL-30B-A3B with 12 of its 48 layers, random, trains, samples and recovers on an H200. Engine and
  trainer are 0.037 nats apart there and 0.50 at most, for a fifth of its tokens go to other experts by rounding alone;
  with `--replay-routing` 0.008 and 0.083 (docs/performance.md).

- Every rope type of transformers is served. `longrope` and `dynamic` rotate all tokens of a microbatch by its
  longest sample if that is beyond the model's original length, and the engine then differs on short texts, by 2.6 nats
  on a tiny model. Within that length trainer and engine are right; a server with a longer context refuses them.
- `--context-parallel N` serves every kind here whose tokens see only those before them, or a window of these, if N
  divides its heads. On the CPU the tests compare Qwen3-VL, Mistral, Gemma 2, gpt-oss, Qwen3-Next, Qwen3.5, InternVL,
  SmolVLM2 and a Qwen3 on two ranks with one rank. No GPU has run it yet.
- Windows are served, but refused for Qwen2 MoE if only some layers have one: the engine ignores them. On CUDA the start
  compares FlashAttention's windows with their definition; no engine has run with them there yet. Attention in
  chunks and decoders that look ahead are refused in bfloat16 on CUDA. StableLM and Nemotron are refused when they have
  been loaded: in transformers their attention does not get the lengths of packed samples. So are models that scale or
  cap their logits, except Granite and Gemma 2: of Cohere the engine has no adapters for the head.
- Gemma 2 is refused in bfloat16 on CUDA: no kernel there has the cap of its attention's scores and a backward.
- fp8 in blocks of 128 by 128 (Qwen's `-FP8`: `quant_method` fp8, `weight_scale_inv`), of every kind: trainer and
  engine dequantise each tensor as they read it, with one function, and compute in the precision of any other base; in
  memory it has twice the size of the files, as the plan says. The engine's own fp8 is not used, for it rounds
  activations too. Edges that 128 does not divide, modules that were not converted, and experts that the files have
  one by one are taken as they are. Tested for Qwen3, its MoE, Qwen3-VL, its MoE and Qwen3.5 MoE with files that are
  made so, on the CPU; no published ones have been loaded yet, and CUDA has not run it. An adapter is trained on the
  dequantised numbers: beside an engine that computes in fp8 its scores differ, by what nobody has measured. fp8 with
  one scale for a tensor, static activations, other blocks or scales, compressed-tensors, and all other quantisation
  are refused by name, and so is `--full`.
- gpt-oss: its weights in MXFP4 are dequantised to bfloat16 by trainer and engine when they are loaded, to four times
  the size of the files. Sinks, routers and all biases are frozen. Each expert's gate, up and down have adapters of
  their own, saved as `w1`, `w3`, `w2`; vLLM itself takes one of gate and up together for this kind, so merge what you
  use elsewhere. Conversations (`/v1/chat/completions` and its kin) are refused, since vLLM would write them in another
  format than the model's template and download that; completions and samples are served. Its kernels on CUDA have not
  run yet.

## Refused

| kind | message |
|---|---|
"""


def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory() as directory:
        served = [
            _line(name, make(Path(directory) / str(number))) for number, (name, make) in enumerate(SERVED.items())
        ]
    refused = [f"| {name} | {_refusal(*kind)} |\n" for name, kind in REFUSED.items()]
    return HEAD + "".join(served) + NOTES + "".join(refused)


def _line(name: str, source: Path) -> str:
    config = AutoConfig.from_pretrained(source)
    family = find_family(config, str(source))
    check_coverage(family, config, str(source))
    with torch.device("meta"):
        model = family.model_class.from_config(config)
    groups = family.lora_modules(model)
    flags = [_short(groups[flag]) for flag in ("train_attn", "train_mlp", "train_unembed")]
    names = {re.sub(r"\.\d+\.", ".*.", one) for one, _ in model.named_modules()}
    frozen = ", ".join(f"`{one.rpartition('*.')[2]}`" for one in family.frozen if one in names) or "-"
    has_experts = any(one.endswith(".experts") for one in groups["train_mlp"])
    cells = [name, f"`{config.architectures[0]}`", _yes(family.vision is not None), _yes(has_experts)]
    return f"| {' | '.join([*cells, *flags, frozen])} |\n"


def _yes(given: bool) -> str:
    return "yes" if given else "no"


def _short(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(f"`{one}`" for one in _endings(names)))


def _endings(names: list[str]) -> Iterator[str]:
    for name in names:
        layer = re.fullmatch(r".*layers\.\d+\.(?:self_attn|mlp)?\.?(.+)", name)
        yield layer[1] if layer else name


def _refusal(kind: str, architecture: str) -> str:
    config = AutoConfig.for_model(kind) if "vl" in kind or kind == "gemma3" else AutoConfig.for_model(kind, **SIZES)
    config.architectures = [architecture]
    try:
        check_coverage(find_family(config, kind), config, kind)
    except BackendFailed as error:
        return str(error).removeprefix(f"{kind}: ")
    raise AssertionError(f"{kind} is served")


if __name__ == "__main__":
    PAGE.write_text(page())
