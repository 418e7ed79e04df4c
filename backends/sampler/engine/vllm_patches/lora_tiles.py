"""Tiles of vLLM's two LoRA kernels on CUDA: shrink multiplies by A, expand by B.

By vLLM's own sizes, a decode step of 16 tokens divides the inputs of a linear over 64 programs, where a linear of 2,560
inputs has work for ten, and every program adds to the result; and a program of expand takes 64 tokens, of which an
adapter has four. The sizes here are the fastest of 230 that an H200 ran, for the linears of a model of 4 B at rank 32
(`benchmarks/RESULTS.md`). They change the order of sums, and nothing else.
"""

from tinker_server.backends.sampler.engine.vllm_patches import targets

_FEW_TOKENS, _SOME_TOKENS, _MANY_TOKENS = 32, 64, 512
Tiles = dict[str, int | None]


def choose_tiles(op_type: str, *, batch: int, num_slices: int, **_: object) -> Tiles:
    """Return the sizes of a shrink or an expand of `batch` tokens: of a tile's tokens, outputs and inputs, and of the
    programs that divide the inputs."""
    common: Tiles = {"num_warps": 4, "num_ctas": 1, "max_nreg": None}
    if op_type == "shrink":
        side = 16 if batch <= _FEW_TOKENS else 32
        # One linear alone has few programs, so that each takes fewer inputs.
        parts = (16 if batch <= _MANY_TOKENS else 8) * (2 if num_slices == 1 else 1)
        tile: Tiles = {"block_m": side, "block_n": side, "block_k": 64, "split_k": parts, "group_size_m": 8}
        return {**common, **tile, "num_stages": 2}
    assert op_type == "expand"
    alone = num_slices == 1 and batch <= _MANY_TOKENS
    rows = 16 if batch <= _SOME_TOKENS else 32 if alone else 64
    return {**common, "block_m": rows, "block_n": 128, "block_k": 32, "num_stages": 1}


def set_tiles() -> None:
    """Apply the change, once, before a model is made."""
    for patch in (targets.SHRINK_TILES, targets.EXPAND_TILES):
        patch.replace(choose_tiles)
