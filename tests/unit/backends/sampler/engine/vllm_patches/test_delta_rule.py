"""Sizes of vLLM's kernels for the delta rule, which begin CUDA as they are imported, and so are read here."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from tinker_server.backends.sampler.engine.vllm_patches import delta_rule


@pytest.mark.heavy
@pytest.mark.parametrize("name", delta_rule._TUNED)
def test_kernels_whose_sizes_are_kept_are_those_that_vllm_tries(name: str) -> None:
    module, _, function = name.partition(":")
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    path = Path(vllm.origin).parent / "third_party" / "flash_linear_attention" / "ops" / f"{module}.py"
    tree = ast.parse(path.read_text())
    kernel = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
    tried = next(call for call in kernel.decorator_list if "autotune" in ast.unparse(call))
    sizes = next(node for node in ast.walk(tried) if isinstance(node, ast.Dict))
    kept, num_warps, num_stages = delta_rule._TUNED[name]
    assert [ast.literal_eval(key) for key in sizes.keys if key is not None] == list(kept)
    assert num_warps in (1, 2, 4, 8) and num_stages in (2, 3, 4)
