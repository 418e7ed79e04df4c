"""Sizes for vLLM's two LoRA kernels: those that vLLM takes, those that are taken here, and the fastest of many.

    python benchmarks/lora_tiles.py [--processes 10] [--figures FILE]

The linears of a model of 4 B at rank 32, with four adapters in four slots and with one: eight sets of weights in turn,
so that no cache holds them, in one CUDA graph. Several processes compile first.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.fp8_experts import compile_first, microseconds
from tinker_server.backends.sampler.engine.vllm_patches.lora_tiles import Tiles, choose_tiles

LINEARS = {
    "query, key, value": (2560, (4096, 1024, 1024)),
    "attention's output": (4096, (2560,)),
    "gate, up": (2560, (9728, 9728)),
    "down": (9728, (2560,)),
}
"""Inputs, and outputs of each slice."""
CASES = ((256, 4), (64, 4), (16, 4), (256, 1), (16, 1), (1024, 4))
"""Tokens, and adapters that they have in turn."""
RANK, SLOTS, SETS = 32, 4, 8
Op = Literal["shrink", "expand"]
OPS: tuple[Op, ...] = ("shrink", "expand")


def candidates(op: Op) -> Iterator[Tiles]:
    """Yield sizes to try."""
    if op == "shrink":
        for side, outputs, inputs, parts, warps, stages in product(
            (16, 32), (16, 32), (64, 128, 256), (4, 8, 16, 32), (2, 4), (2, 3)
        ):
            tile = {"block_m": side, "block_n": outputs, "block_k": inputs, "split_k": parts, "group_size_m": 8}
            yield {**tile, "num_warps": warps, "num_stages": stages, "num_ctas": 1, "max_nreg": None}
        return
    for rows, outputs, warps, stages in product((16, 32, 64), (64, 128, 256), (2, 4, 8), (1, 2)):
        tile = {"block_m": rows, "block_n": outputs, "block_k": 32}
        yield {**tile, "num_warps": warps, "num_stages": stages, "num_ctas": 1, "max_nreg": None}


class Kernels:
    """Both kernels on the weights of one kind of linear."""

    def __init__(self, linear: str, num_tokens: int, num_adapters: int, num_sets: int) -> None:
        from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op, utils
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

        utils._LORA_A_PTR_DICT.clear()  # it has the shapes of what was at an address before
        utils._LORA_B_PTR_DICT.clear()
        self._modules = {"shrink": lora_shrink_op, "expand": lora_expand_op}
        inputs, outputs = LINEARS[linear]
        meta = LoRAKernelMeta.make(SLOTS, num_tokens, "cuda")
        meta.prepare_tensors(torch.arange(num_tokens, dtype=torch.int32, device="cuda") % num_adapters)
        self._which = meta.meta_args(num_tokens, True)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda").bfloat16()

        self._x, self._y = random(num_tokens, inputs), random(num_tokens, sum(outputs))
        self._inner = torch.zeros(len(outputs), num_tokens, RANK, device="cuda")
        self._a = [[random(SLOTS, 1, RANK, inputs) for _ in outputs] for _ in range(num_sets)]
        self._b = [[random(SLOTS, 1, size, RANK) for size in outputs] for _ in range(num_sets)]

    def run(self, op: Op, tiles: Any) -> None:
        """Run a kernel once on each set. `tiles` returns its sizes."""
        module = self._modules[op]
        module.get_lora_op_configs = tiles
        for a, b in zip(self._a, self._b, strict=True):
            if op == "shrink":
                module._lora_shrink(self._x, a, self._inner, *self._which, 1.0)
            else:
                module._lora_expand(self._inner, b, self._y, *self._which, 0, True)

    def microseconds(self, op: Op, tiles: Any) -> float:
        """Return the mean for one set."""
        return microseconds(partial(self.run, op, tiles)) / len(self._a)


def compile_share(number: int, of: int) -> None:
    """Compile every so many-th of the candidates."""
    for linear, op in product(LINEARS, OPS):
        kernels = Kernels(linear, 64, SLOTS, 1)
        for tiles in list(candidates(op))[number::of]:
            kernels.run(op, lambda *_, tiles=tiles, **__: tiles)


def main() -> None:
    """Compile, time, and print a line for each case."""
    path = compile_first(__doc__, compile_share)
    from vllm.lora.ops.triton_ops.utils import get_lora_op_configs

    figures = []
    for (num_tokens, num_adapters), linear in product(CASES, LINEARS):
        kernels = Kernels(linear, num_tokens, num_adapters, SETS)
        for op in OPS:
            theirs, ours = (kernels.microseconds(op, tiles) for tiles in (get_lora_op_configs, choose_tiles))
            times = [(kernels.microseconds(op, lambda *_, tiles=tiles, **__: tiles), tiles) for tiles in candidates(op)]
            best, tiles = min(times, key=lambda timed: timed[0])
            name = f"{num_tokens} tokens, {num_adapters} adapters, {linear}, {op}"
            print(f"{name}: vLLM's {theirs:.1f}, ours {ours:.1f}, best {best:.1f} us ({tiles})", flush=True)
            figures.append({"case": name, "vLLM's": theirs, "ours": ours, "all": times})
        if path is not None:
            path.write_text(json.dumps(figures))
        del kernels
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
