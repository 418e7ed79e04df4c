"""Kernels of packed weights as Triton compiles them for cards that no machine here has."""

import re
from typing import Any

import pytest

from tinker_server.backends.kernels.cards import CHOICES, Capability

triton = pytest.importorskip("triton", reason="Triton compiles for a GPU without one")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
ALIGNED = [["tt.divisibility", 16]]


SIZES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("product", {"num_rows": rows, "num_outputs": outputs, "num_inputs": 8192})
        for rows, outputs in [(1, 8192), (64, 57344), (128, 57344), (256, 8192), (256, 57344)]
    ),
    *(
        ("experts", {"rows": rows, "is_fp4": is_fp4, "is_transposed": is_transposed})
        for rows, is_fp4, is_transposed in [
            (16, False, False),
            (128, False, False),
            (256, False, True),
            (64, True, False),
            (256, True, True),
        ]
    ),
]


def compiled(capability: Capability, kernel: str, given: dict[str, Any]) -> Any:
    from tinker_server.backends.kernels import fp8, packed_experts

    kib = CHOICES[capability].shared_memory_kib
    constants: dict[str, Any]
    if kernel == "product":
        function = fp8._product
        own = fp8.tiles(**given)
        stages, warps = own.stages, own.warps
        constants = {"ROWS": own.rows, "OUTPUTS": own.outputs, "BLOCK": 128, "STEP": own.inputs}
        types = {"x": "*bf16", "weight": "*fp8e4nv", "scale": "*fp32", "found": "*bf16"}
    else:
        function, is_fp4 = packed_experts._product_by_expert, given["is_fp4"]
        outputs, inputs, stages, warps = packed_experts.tile_sizes(**given, shared_memory_kib=kib)
        missing = ("pair_numbers", "tile_experts", "num_set", "pair_weights", *(() if is_fp4 else ("bias",)))
        constants = {"ROWS": given["rows"], "OUTPUTS": outputs, "INPUTS": inputs, "EXPERTS": 128, "IS_FP4": is_fp4}
        constants |= {"IS_TRANSPOSED": given["is_transposed"], "column_stride": 1, "column_scale_stride": 1}
        constants |= dict.fromkeys(missing)
        of_weight, of_scale = ("*u8", "*u8") if is_fp4 else ("*fp8e4nv", "*fp32")
        types = {"x": "*bf16", "weight": of_weight, "scale": of_scale, "bias": "*bf16", "found": "*bf16"}
        types["ends"] = "*i32"
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(at,): ALIGNED for at, name in enumerate(names) if signature[name] != "constexpr"}
    target = triton.backends.compiler.GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    source = triton.compiler.ASTSource(function, signature, constants, aligned)
    return triton.compile(source, target=target, options={"num_stages": stages, "num_warps": warps})


@pytest.mark.parametrize(("kernel", "given"), SIZES)
def test_no_product_is_in_flight_when_the_next_weights_are_dequantised(kernel: str, given: dict[str, Any]) -> None:
    """Tensor cores read weights from registers, which the next ones may get."""
    ptx = compiled((9, 0), kernel, given).asm["ptx"]
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx)
    assert set(waits) == {"0"}


@pytest.mark.parametrize(("kernel", "given"), [one for one in SIZES if max(one[1].values()) >= 128])
def test_large_tiles_fit_into_the_shared_memory_of_a_small_card(kernel: str, given: dict[str, Any]) -> None:
    found = compiled((8, 9), kernel, given).metadata.shared
    assert found <= CHOICES[(8, 9)].shared_memory_kib << 10
