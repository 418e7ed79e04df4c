"""Writes docs/hardware.md from the memory plan: `make hardware`. A test holds the page to what this gives.

`tinker-server doctor --gpu CARD:COUNT` makes the same plan of a model's own files. Here large models stand for
themselves by their shapes.
"""

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.published import COOKBOOK, NOT_FOUND
from tests.shapes import shape
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.gpus import CARDS_GIB, cards
from tinker_server.backends.configure.memory_plan import GIB, Machine, MemoryPlan
from tinker_server.backends.configure.model_size import TRAINED_IMAGE_TOKENS
from tinker_server.backends.configure.placement import make_plan
from tinker_server.backends.model_spec import BasePrecision
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.model.vision import FROZEN_VALUES, TRAINED_VALUES

PAGE = Path(__file__).parents[1] / "docs/hardware.md"
MODELS = {
    "4b": "Qwen3-VL-4B, images",
    "8b-text": "Qwen3-8B, text",
    "32b": "Qwen3-VL-32B, images",
    "30b-a3b": "Qwen3-VL-30B-A3B, images, experts",
    "70b": "Llama-3.1-70B, text",
}
COUNTS = (1, 2, 4, 8)
LARGE_CARDS = ("H100", "H200", "B200")
HEAD = """# Hardware

The tables show, for each model and card, the smallest number of cards that can serve the model with the default
settings. The server trains and samples the model on these cards at the same time.

A cell shows the number of cards, the longest context, the largest LoRA rank, and the number of models of this rank that
have memory of their own while they train; [further models](operating.md#options-of-the-plan) share what is left. A dash
means that eight cards of one machine are too few. With `*`, inputs of layers that recompute [wait in main
memory](operating.md#small-cards).

"""
IN_FP8 = {
    "9b": "Qwen3.5-9B, images",
    **{name: MODELS[name] for name in ("8b-text", "32b")},
    "Qwen/Qwen3.6-27B": "Qwen3.6-27B, images",
    "30b-a3b": MODELS["30b-a3b"],
    "Qwen/Qwen3.6-35B-A3B": "Qwen3.6-35B-A3B, images, experts",
    "70b": MODELS["70b"],
    "235b-a22b": "Qwen3-VL-235B-A22B, images, experts",
}
FP8_HEAD = """
## Bases in fp8
With `--base-precision fp8`, the linears and experts of a decoder that is published in fp8 by blocks stay so, in trainer
and engine, in one copy if they fit on one card. Of files that are not quantised, both make the same fp8 at load. This
table is for either.

"""
IN_MXFP4 = {"openai/gpt-oss-20b": "gpt-oss-20b, text, experts", "openai/gpt-oss-120b": "gpt-oss-120b, text, experts"}
MXFP4_HEAD = """
## gpt-oss in MXFP4
With `--base-precision mxfp4`, the experts of gpt-oss stay as they are in its files, in one copy for trainer and engine.
The table of the cookbook's models is for the default, which dequantises them to four times the size.

"""
COOKBOOK_HEAD = """
## The models of the cookbook
These are the models that the cookbook's `model_info` names. Parameters are billions of numbers in the base, with the
vision tower. If a model is refused, the last column shows the beginning of the server's reason.
"""
IMAGES = {
    "Qwen3-VL": "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen3-VL MoE": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "Qwen3.5": "Qwen/Qwen3.5-9B",
    "Qwen3.5 MoE": "Qwen/Qwen3.5-35B-A3B",
}
"""A model of each kind that takes images and whose config is known."""
IMAGES_HEAD = """
## Memory for images
These are MiB that 1,000 tokens of images take in bfloat16. In these models, a token is 32 x 32 pixels, and an image of
1024 x 1024 pixels has 1,024 tokens.

- **pixels:** in main memory, while a prompt or a batch waits, and in the image cache of the engine
- **features:** on the GPU in a microbatch, and in main memory in the image cache of the trainer
- **tower:** on the GPU in one call of the frozen vision tower. A call of the trainer has at most {frozen:,} tokens, or
  one larger image
- **trained tower:** on the GPU in one call, with `--train-vision`. A call has at most {trained} tokens, or one larger
  image. The plan has room for an image of {planned:,} tokens. A larger one needs memory that the microbatches leave
- **decoder:** on the GPU in a microbatch, if all layers recompute, and if none does: as for tokens of text
- **KV cache:** on the GPU in the engine, as for tokens of text

"""
NOT_IN_THE_TABLE = "Models whose published configs were not found are not in the table: "
NOTES = """
## What these figures are
- **These are plans, not measurements.** `make hardware` writes this page from the memory plan, and a test compares the
  page with the plan. The sizes of weights, adapters, slots and cache are exact. All other sizes are estimated from one
  H200. [Performance](performance.md) lists measurements.
- **Images, measured** on one H200 on 2026-11-28, four images of 640 x 480 pixels in one call: 139 MiB in the frozen
  tower of Qwen3-VL-4B and 3,192 in the trained one; 145 and 3,895 in those of Qwen3-VL-30B-A3B (`pytest
  tests/gpu/test_memory.py -s -k vision_tower`). The towers of Qwen3.5 have not been measured.
- **Your own model:** `tinker-server doctor --model NAME=DIRECTORY --gpu CARD:COUNT` makes the same plan from the
  model's files, and prints every part on every card. It needs no GPU. CARD is one of the names in the table.
- **Cards before Hopper** (compute capability 8.0, 8.6 and 8.9) have other kernels: the trainer's attention is
  FlashAttention 2 for samples of every length, where Hopper has cuDNN's for long ones; the engine's is FlashAttention 2
  in place of 3; the delta rule's kernels choose their sizes at each first start; and below 8.9 torch dequantises bases
  in fp8. Where a program has 99 KiB of shared memory (8.9, 12.0), kernels for experts load fewer tiles ahead.
  `backends/kernels/cards.py` has the table. Tests compare the choices with it, and compile the kernels of packed
  weights for 8.9 and 9.0. Only H100 and H200 (9.0) have run.
- **If a model does not fit:** use a shorter context, a smaller rank, a base in fewer bytes (`--base-precision`), or
  more cards. The refusal names the nearest settings that fit. [The operator's
  guide](operating.md#what-this-machine-can-serve) explains the options.
- **Several cards** hold one model in parts: the trainer and the engine have separate cards, or the model is divided
  over the cards. Further cards are used too: each gets a rank of the trainer, and an engine if it has room.
- **Disk** is needed for the model's files and for saved weights. An adapter of rank 32 on 4 billion parameters has
  {adapter_gib:.2f} GiB, or {state_gib:.2f} GiB with its optimizer.
- **A CPU** can serve every kind of model, slowly. The server with its small model and the demo's client took 4.1 GiB of
  main memory. `doctor` without `--gpu` plans for the machine that it runs on.
"""


def page() -> str:
    """The whole page."""
    adapter_gib = shape("4b").adapter_numbers(32) * 4 / GIB
    not_found = textwrap.fill(NOT_IN_THE_TABLE + ", ".join(map(_short, NOT_FOUND)) + ".", 120, break_on_hyphens=False)
    lines = [*_card_lines(MODELS), FP8_HEAD + "\n".join(_card_lines(IN_FP8, "fp8"))]
    lines += [MXFP4_HEAD + "\n".join(_card_lines(IN_MXFP4, "mxfp4"))]
    lines += [COOKBOOK_HEAD, *_cookbook_lines(), "", not_found, _images_head() + "\n".join(_image_lines())]
    notes = NOTES.format(adapter_gib=adapter_gib, state_gib=3 * adapter_gib)
    return HEAD + "\n".join(lines) + "\n" + notes


def _card_lines(sizes: Mapping[str, str], precision: BasePrecision | None = None) -> Iterator[str]:
    """Yield the lines of a table of models by cards."""
    yield f"| card, memory | {' | '.join(sizes.values())} |"
    yield f"|---|{'---|' * len(sizes)}"
    for card, memory_gib in CARDS_GIB.items():
        cells = (_cell(size, card, precision) for size in sizes)
        yield f"| {card}, {memory_gib:g} GiB | {' | '.join(cells)} |"


def _cookbook_lines() -> Iterator[str]:
    """Yield the lines of the table of the cookbook's models, one for all models of equal shapes."""
    cards = " | ".join(f"{card}, {CARDS_GIB[card]:g} GiB" for card in LARGE_CARDS)
    yield f"| model | parameters | {cards} | refused, or too large |"
    yield f"|---|---|{'---|' * len(LARGE_CARDS)}---|"
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name, config in COOKBOOK.items():
        alike[json.dumps(config)].append(name)
    for names in alike.values():
        yield f"| {', '.join(map(_short, names))} | {' | '.join(_cookbook_cells(names[0]))} |"


def _cookbook_cells(name: str) -> list[str]:
    """Return a model's parameters, its plan on each card, and the reason if there is none."""
    try:
        size = shape(name)
    except BackendFailed as refused:
        # Behind the source, without the advice, and of weights the first two.
        reason, *weights = re.split(r"; |\. ", str(refused).partition(": ")[2])[0].split(", ")
        reason += "".join(f", {name}" for name in weights[:1]) + (" and others" if weights[1:] else "")
        return ["", *("-" for _ in LARGE_CARDS), reason]
    plans = [_cell(name, card) for card in LARGE_CARDS]
    reason = "" if any(plan != "-" for plan in plans) else "too large for eight cards"
    return [f"{size.numbers.base / 1e9:.1f}", *plans, reason]


def _images_head() -> str:
    token = shape(IMAGES["Qwen3-VL"]).image_token
    assert token is not None
    frozen, trained = (values // token.pixels for values in (FROZEN_VALUES, TRAINED_VALUES))
    return IMAGES_HEAD.format(frozen=frozen, trained=trained, planned=TRAINED_IMAGE_TOKENS)


def _image_lines() -> Iterator[str]:
    """Yield the lines of the table of what tokens of images take."""
    yield "| kind | model | pixels | features | tower | trained tower | decoder | KV cache |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind, name in IMAGES.items():
        size = shape(name)
        assert size.image_token is not None
        token = size.image_token
        decoder = [size.activation_bytes(1000, recomputes=one) for one in (True, False)]
        constant = [size.activation_bytes(0, recomputes=one) for one in (True, False)]
        recomputed, saved = (ours - none for ours, none in zip(decoder, constant, strict=True))
        mib = [f"{one * 1000 / (1 << 20):.1f}" for one in (token.pixels, token.features)]
        mib += [f"{one * 1000 / (1 << 20):,.0f}" for one in (token.forward, token.backward)]
        mib += [f"{recomputed / (1 << 20):,.0f} to {saved / (1 << 20):,.0f}"]
        mib += [f"{size.token_bytes() * 1000 / (1 << 20):.0f}"]
        yield f"| {kind} | {_short(name)} | {' | '.join(mib)} |"


def _short(name: str) -> str:
    return name.partition("/")[2]


def _cell(size: str, card: str, precision: BasePrecision | None = None) -> str:
    for count in COUNTS:
        if (plan := _plan(size, f"{card}:{count}", precision)) is not None:
            (demand,) = plan.demands.values()
            mark = "*" if demand.offloads_inputs else ""
            return f"{count}: {demand.context}, rank {demand.lora_rank} x {demand.models_at_once}{mark}"
    return "-"


def _plan(size: str, gpus: str, precision: BasePrecision | None) -> MemoryPlan | None:
    names, sizes = zip(*cards(gpus), strict=True)
    try:
        config = BackendConfig(base_precision=precision)
        return make_plan([shape(size, precision=precision)], config, Machine(0, sizes, names), "cuda")
    except BackendFailed:
        return None


if __name__ == "__main__":
    PAGE.write_text(page())
