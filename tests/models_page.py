"""Writes docs/models.md from the families themselves: `make models`. A test holds the page to what this gives.

Every line is of a tiny model of the kind, the one that tests/contract/test_families.py trains and samples.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from tests.models import (
    FAMILIES,
    make_tiny_gemma3,
    make_tiny_internvl,
    make_tiny_moe,
    make_tiny_nemotron_h,
    make_tiny_of,
    make_tiny_qwen2_5_vl,
    make_tiny_qwen3_5,
    make_tiny_qwen3_next,
    make_tiny_smolvlm,
    make_tiny_text,
    make_tiny_vl,
)
from tinker_server.backends.families.coverage import check_coverage
from tinker_server.backends.families.family import Family
from tinker_server.backends.families.lora_names import service_adapters
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.protocol import BackendFailed

PAGE = Path(__file__).parents[1] / "docs/models.md"
SERVED: dict[str, Callable[[Path], Path]] = {
    "Qwen3-VL": make_tiny_vl,
    "Qwen3-VL MoE": partial(make_tiny_vl, moe=True),
    "Qwen2.5-VL": make_tiny_qwen2_5_vl,
    "InternVL": make_tiny_internvl,
    "SmolVLM2": make_tiny_smolvlm,
    "Gemma 3 with images": make_tiny_gemma3,
    "Qwen3.5": make_tiny_qwen3_5,
    "Qwen3.5 MoE": partial(make_tiny_qwen3_5, moe=True),
    "Qwen3": make_tiny_text,
    "Qwen3 MoE": make_tiny_moe,
    "Qwen3-Next": make_tiny_qwen3_next,
    "Nemotron-H": partial(make_tiny_nemotron_h, moe=False),
    "Nemotron-3": make_tiny_nemotron_h,
    "Qwen2 MoE": FAMILIES["Qwen2 MoE"],
    "Mixtral": FAMILIES["Mixtral"],
    "Llama": partial(make_tiny_of, "llama"),
    "Mistral": FAMILIES["Mistral"],
    "Gemma 3 (text)": FAMILIES["Gemma 3"],
    "Gemma 2": FAMILIES["Gemma 2"],
    "Granite": FAMILIES["Granite"],
    "gpt-oss": FAMILIES["gpt-oss"],
    "DeepSeek-V3": FAMILIES["DeepSeek-V3"],
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
    "LFM2": ("lfm2", "Lfm2ForCausalLM"),
    "Falcon-H1": ("falcon_h1", "FalconH1ForCausalLM"),
}
HEAD = """# Models

`make models` writes this page, and a test compares it with the server. A kind of model that is not in the table is
refused at start, unless it is a dense text decoder of transformers. In this case, the start checks that LoRA covers
every weight, and that the trainer's scores equal the model's own.

The tests train and sample each kind in the table with a random model of about 0.3 M parameters. These results agree to
1e-4 nats in float32: the trainer's and transformers', packed and single samples, the trainer's and those of saved
weights merged into transformers, and the sampler's and the trainer's, with adapters and images. For the sampler of
Qwen3.5 and Qwen3-Next, which runs in bfloat16, the mean difference is at most 0.03 nats and the largest 0.25.
[Performance](performance.md#larger-models-on-one-gpu) has figures of larger models.

| kind | architecture | images | experts | `train_attn` | `train_mlp` | `train_unembed` | frozen |
|---|---|---|---|---|---|---|---|
"""
OWN = """
The table has the target modules of the layout `service`, which new models have. Those of the layout `own`
([both](training.md#two-layouts)) differ in these kinds:

| kind | trained with `own` | in their place with `service` |
|---|---|---|
"""
NOTES = """
- **Files.** Weights are in `model.safetensors`, or in the files that `model.safetensors.index.json` names. Trainer,
  engine and memory plan read these, and config, tokenizer and processor as transformers has them; vLLM gets links to
  these files alone. Other layouts beside them, such as Mistral's `consolidated.safetensors` and `params.json`, variants
  (`model.fp16.safetensors`) and `original/`, are not read. Refused by name: both sets of weights, a missing file of the
  index, a tensor in two files, `adapter_config.json`, `hf_quant_config.json`, `transformers_weights` in the config.
- **Inputs.** Video and audio are refused for every kind.
- **Vision tower.** It is frozen by default. With `--train-vision`, its linear layers and those of its mergers are
  trained in the Qwen kinds (`model.visual`), and trainer and engine agree. The embedding of patches stays frozen.
  InternVL, SmolVLM and Gemma 3 with images refuse the option at start.
- **Experts.** Each of an expert's three matrices shares one of its factors with all experts of the layer, or has its
  own adapter of the full rank ([two layouts](training.md#two-layouts)). Nemotron's experts have two matrices.
  Routers and the gates of shared experts are frozen.
- **Packing.** Samples of all kinds share packed microbatches. Layers of linear attention start again at each sample.
  On CUDA in bfloat16, the delta rule (Qwen3.5, Qwen3-Next) has flash-linear-attention's kernels, and these layers are
  compiled and part of CUDA graphs. Elsewhere they compute transformers' equations in torch, and so does Mamba2.
- **Exports** have tinker's names, with `mlp.experts.w1`, `w3` and `w2` as stacks over experts; of Nemotron
  `mixer.experts.w1`, which is up, and `w2`. A factor that all experts of a layer share is there once, as in the hosted
  service's files (`[1, rank, hidden]` of A of gate and up, `[1, hidden, rank]` of B of down), and uploads may have it
  so. For PEFT and vLLM they have the names of the model's own files, expert by expert. The cookbook's tools can build
  and merge them, except for Mixtral, whose files have other names (`block_sparse_moe.experts.0.w1`). PEFT 0.21 reads
  the exports of Qwen3 MoE and Mixtral. For other kinds with experts, and for models that also have layers without
  experts, it omits a part without an error: merge these exports.
- **InternVL** must have transformers' own form (`-hf`) and a dense decoder. An image consists of up to 12 tiles and one
  tile of the whole image, between `<img>` and `</img>`. On CUDA its engine has run.
- **SmolVLM** divides images into tiles too, with their positions as text and with `<fake_token_around_image>`. The
  first SmolVLM (`Idefics3ForConditionalGeneration`) is served like SmolVLM2, by the same class of the engine; the tests
  only compare its trainer with transformers.
- **Gemma 3 with images.** The tokens of one image see each other in both directions, in layers with a window too. All
  other tokens see only earlier ones. In vLLM 0.32 the CPU's attention has no such images, and a step may end within
  one. The server corrects both ([upstream](upstream/index.md)), and checks every load of an adapter behind an image.
  An image has 896 x 896 pixels whatever its shape, and 256 features between `<start_of_image>` and `<end_of_image>`,
  with two newlines on each side. A newline of the text beside it stays a token of its own, also in conversations; the
  model's own processor would join the newlines. The engine needs the names of the published files: transformers 5
  shortens those of the tower (`vision_tower.vision_model.`) when it saves. Refused at start: pan-and-scan
  (`do_pan_and_scan`), a window shorter than an image, and `--train-vision`.
- **Linear attention** (Qwen3.5, Qwen3-Next, Nemotron) keeps A_log in float32 in trainer and engine, whatever the
  precision, and the delta rule's gated norm too: published files of Qwen3.5 have both so.
- **Merged projections.** `in_proj_q`, `in_proj_k` and `in_proj_v` are rows of `in_proj_qkv` of Qwen3.5, and with
  `in_proj_z` of `in_proj_qkvz` of Qwen3-Next; `gate_proj` and `x_proj` are rows of Mamba2's `in_proj`. Exports have
  these names, which the hosted service's files have too. PEFT's form has one adapter of the merged projection, of as
  many times the rank as it has parts, in blocks (`rank_pattern`, `alpha_pattern`). Uploads may have either. PEFT 0.21
  refuses `out_proj` of Mamba2: merge these exports.
- **Nemotron-H, Nemotron-3-Nano** (`NemotronHForCausalLM`). Each layer is Mamba2, attention without rotation, an MLP or
  experts, alone. Convolutions, A, D and biases of time steps are frozen, and so are norms and routers. The scan is in
  plain torch; layers of Mamba2 are not compiled, and the model is not part of CUDA graphs. transformers lengthens time
  steps below `time_step_min`, which is meant for initial values; vLLM does not, and the trainer follows vLLM.
  Multi-token prediction is not loaded. Refused by name: more than one shared expert, latent experts
  (Nemotron-3-Super), quantised files, other activations, limits of time steps, `--replay-routing`, and on a CPU [one
  copy of the base](operating.md#one-copy-of-the-base). No published file has been loaded yet. vLLM on a CPU
  computes it in float32 too.
- **On a CPU,** vLLM 0.32 has no kernel for experts with adapters, so the server has its own simple one. The linear
  attention of Qwen3.5 and Qwen3-Next on a CPU is only in bfloat16.
- **On an H200 in bfloat16,** these differences were measured, mean and largest, in nats. Trainer on the H200 and on a
  CPU: 0.015 (experts), 0.017 and 0.17 (Qwen3-Next). Engine and trainer: 0.010 and 0.054 (Qwen3 MoE), 0.006 and 0.035
  (Qwen3-VL MoE), 0.013 and 0.058 (Qwen3.5), 0.016 and 0.081 (Qwen3.5 MoE), at most 0.014 and 0.052 with trained towers
  (Qwen3-VL, Qwen3-VL MoE, Qwen2.5-VL).
- **On an H100 in bfloat16** (26 November 2026, tiny models), trainer and the same on a CPU in float32 differed by 0.015
  and 0.11 (Mistral), 0.008 and 0.03 (Gemma 3), 0.013 and 0.04 (Gemma 3 with images), 0.010 and 0.08 (gpt-oss), 0.014
  and 0.10 (Nemotron-H), 0.015 and 0.06 nats (Qwen3.5), 0.022 and 0.11 (DeepSeek-V3), 0.016 and 0.13 (Qwen3-Next).
  Engine and trainer with one copy of the base in fp8: 0.011 and 0.056 (Qwen3-VL), 0.004 and 0.015 (Qwen3-VL MoE).
- **On H200s and H100s in bfloat16** (26 November 2026, tiny models with adapters), engine and trainer differed by 0.008
  and 0.044 (Mistral), 0.009 and 0.037 (Gemma 3), 0.008 and 0.028 (Gemma 3 with images), 0.007 and 0.030 (Qwen2 MoE),
  0.010 and 0.091 (gpt-oss), 0.013 and 0.120 (DeepSeek-V3), 0.013 and 0.089 (Nemotron-H), 0.015 and 0.061 (Qwen3.5),
  0.009 and 0.042 (Granite), 0.012 and 0.048 (Qwen2.5-VL), 0.007 and 0.025 (InternVL), 0.007 and 0.021 nats (SmolVLM2);
  Nemotron-3 by 0.020, and by 1.6 at most where rounding sent a token to another expert.
- **Qwen3-VL-30B-A3B** was tested on one H200 as a random model with all 48 layers: it trains, samples and recovers
  from its trainer's death. Engine and trainer differ by 0.039 nats on average and by 0.27 at most, since rounding alone
  sends a fifth of its tokens to other experts. With 12 of the layers they differ by 0.037 and 0.50, and with
  `--replay-routing` by 0.008 and 0.083 (`benchmarks/RESULTS.md`). The shapes of **Qwen3-VL-32B** and **Qwen3.5-4B** ran
  there too, whole.
- **Position embeddings.** Every rope type of transformers is served. But if the longest sample of a microbatch exceeds
  the model's original length, `longrope` and `dynamic` rotate all tokens of the microbatch by that sample's length. The
  engine then differs for short texts, by 2.6 nats on a tiny model. So a server whose context exceeds the original
  length refuses these models. Within it, trainer and engine are correct.
- **Context parallelism.** `--context-parallel N` serves every kind whose tokens see only earlier tokens, or a window of
  these, or their own image, if N divides its heads. Tests on the CPU compare two ranks with one for Qwen3-VL, Mistral,
  Gemma 2, gpt-oss, DeepSeek-V3, Qwen3-Next, Nemotron-3, Qwen3.5, InternVL, SmolVLM2, Gemma 3 with images and a Qwen3.
  On two H100s in bfloat16, a tiny Qwen3-VL was as near float32 as on one.
- **fp8** in blocks of 128 by 128 (Qwen's `-FP8`: `quant_method` fp8, `weight_scale_inv`) is served for every kind but
  Nemotron and gpt-oss. Trainer and engine dequantise each tensor as they read it, with one function, and compute in
  the precision of any other base. In memory, the base has twice the size of its files; the plan says so. With
  `--base-precision fp8` the decoder's linears and experts stay in fp8 in both, and are dequantised for each product;
  of files that are not quantised, [both make the same fp8 at load](operating.md#one-copy-of-the-base). vLLM's own fp8
  is not used, since it also rounds activations. Edges that 128 does not divide, modules that were not converted, and
  experts in separate tensors are supported. Tests on the CPU use files made for them, of Qwen3, its MoE, Qwen3-VL,
  its MoE, Qwen3.5, its MoE, Qwen3-Next and DeepSeek-V3, dequantised once and kept in fp8, the mixtures also with
  engines of two and four ranks and trainers of two. Other tests there quantise these at load, bit by bit as a
  published file, and so did a server of Qwen3.5-35B-A3B's shape on an H200. On a GPU, tests used files on an H100, of
  Qwen3-VL and its MoE, with one copy of the base and with two; on an H200, of Qwen3-VL, its MoE and Qwen3.5's MoE
  that stay in fp8, in one copy. Their experts are multiplied by a kernel that dequantises tile by tile, and that no
  GPU before compute capability 8.9 has. No published file has been loaded yet. An adapter is trained on the
  dequantised numbers; nobody has measured how its scores differ in an engine that computes in fp8. fp8 with one scale
  for a tensor, static activations, other blocks or scales, compressed-tensors and all other quantisation are refused
  by name.
- **Attention.** Windows are served. Windows in some layers alone are served of Gemma 2, Gemma 3, gpt-oss and EXAONE 4,
  and refused of all others: vLLM gives all layers one window or none, or fails. On CUDA, the start compares
  FlashAttention's windows with their definition. Attention in chunks and decoders that look ahead are refused in
  bfloat16 on CUDA. StableLM and Nemotron are refused after loading, since their attention in transformers does not get
  the lengths of packed samples.
- **Logits.** Models that scale or cap their logits are refused, except Granite and Gemma 2. For Cohere, the engine has
  no adapters of the head.
- **Gemma 2** is refused in bfloat16 on CUDA: no kernel there has both the cap of its attention scores and a backward.
- **gpt-oss.** Trainer and engine dequantise its MXFP4 weights to bfloat16 at load, to four times the size of the files.
  With `--base-precision mxfp4` its experts stay packed in both, and are dequantised for each product. Tests on the CPU
  compare scores and gradients with those of the dequantised base; on an H200, tiny trainers and engines agree. In the
  shape of gpt-oss-120b with random weights, an H200 trained and sampled, 0.013 nats apart on average and 0.17 at most.
  Sinks, routers and all biases are frozen. Adapters of an expert's gate, up and down are saved as `w1`, `w3` and `w2`.
  vLLM itself expects one adapter of gate and up together for this kind, so merge the weights for use in other programs.
  Completions and samples are served. Conversations (such as `/v1/chat/completions`) are refused, since vLLM
  would write them in another format than the model's template, and would download this format.
- **DeepSeek-V3** has latent attention (MLA), and a sigmoid router with groups. The linears of the attention, with
  `service` not those out of its latents, and the shared experts are trained; the latents' norms, the routers and what
  corrects their scores are frozen. On CUDA the engine keeps latents (vLLM's MLA) [where it can](decisions.md#parts),
  else whole keys and values, as the trainer does. Either way it is in the mean at most 0.02 nats from the trainer.
  Whole keys and values take 2 x heads x 192 numbers of the KV cache for a token and layer, latents 576: in bfloat16
  0.3 MiB and 30 KiB for a token of Moonlight's shape, 5.7 MiB and 69 KiB of DeepSeek-V3's.
  Moonlight and Kimi K2 have this architecture, but a `model_type` that transformers does not know (`kimi_k2`) is
  refused, and so is a tokenizer with code of its own. DeepSeek-V2, V3.2 and Kimi Linear are refused. A config that the
  engine would compute otherwise is refused by the field's name. No published file has been loaded.

## Refused

| kind | message |
|---|---|
"""


def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory() as directory:
        models = {
            name: _empty(make(Path(directory) / str(number))) for number, (name, make) in enumerate(SERVED.items())
        }
        served = [_line(name, *model) for name, model in models.items()]
        own = [line for name, (family, model) in models.items() for line in _own_line(name, family, model)]
    refused = [f"| {name} | {_refusal(*kind)} |\n" for name, kind in REFUSED.items()]
    return HEAD + "".join(served) + OWN + "".join(own) + NOTES + "".join(refused)


def _empty(source: Path) -> tuple[Family, PreTrainedModel]:
    """The family and a model without memory."""
    config = AutoConfig.from_pretrained(source)
    family = find_family(config, str(source))
    check_coverage(family, config, str(source))
    with torch.device("meta"):
        return family, family.model_class.from_config(config)


def _own_line(name: str, family: Family, model: PreTrainedModel) -> Iterator[str]:
    """The modules of the layout `own` that the service's has not, if there are any."""
    modules = [one for names in family.lora_modules(model).values() for one in names]
    others = [one for one in modules if isinstance(model.get_submodule(one), nn.Linear)]
    if found := _short([one for one in others if service_adapters(model, one) is not None]):
        in_service = _short([part for one in others for part in service_adapters(model, one) or ()])
        yield f"| {name} | {found} | {in_service or '-'} |\n"


def _line(name: str, family: Family, model: PreTrainedModel) -> str:
    config, groups = model.config, family.lora_modules(model)
    flags = [_short(_in_service(model, groups[flag])) for flag in ("train_attn", "train_mlp", "train_unembed")]
    names = {re.sub(r"\.\d+\.", ".*.", one) for one, _ in model.named_modules()}
    frozen = ", ".join(f"`{one.rpartition('*.')[2]}`" for one in family.frozen if one in names) or "-"
    has_experts = any(one.endswith(".experts") for one in groups["train_mlp"])
    cells = [name, f"`{config.architectures[0]}`", _yes(family.vision is not None), _yes(has_experts)]
    return f"| {' | '.join([*cells, *flags, frozen])} |\n"


def _in_service(model: PreTrainedModel, names: list[str]) -> list[str]:
    """The adapters of these modules in the layout of the hosted service."""
    parts = {name: service_adapters(model, name) for name in names if isinstance(model.get_submodule(name), nn.Linear)}
    return [each for name in names for each in ([name] if parts.get(name) is None else parts[name] or ())]


def _yes(given: bool) -> str:
    return "yes" if given else "no"


def _short(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(f"`{one}`" for one in _endings(names)))


def _endings(names: list[str]) -> Iterator[str]:
    for name in names:
        layer = re.fullmatch(r".*layers\.\d+\.(?:self_attn|mlp|mixer)?\.?(.+)", name)
        yield layer[1] if layer else name


def _refusal(kind: str, architecture: str) -> str:
    config = AutoConfig.for_model(kind) if "vl" in kind else AutoConfig.for_model(kind, **SIZES)
    config.architectures = [architecture]
    try:
        check_coverage(find_family(config, kind), config, kind)
    except BackendFailed as error:
        return str(error).removeprefix(f"{kind}: ")
    raise AssertionError(f"{kind} is served")


if __name__ == "__main__":
    PAGE.write_text(page())
