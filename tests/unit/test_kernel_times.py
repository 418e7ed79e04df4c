"""The reading of a profiler's trace by benchmarks/kernel_times.py, on steps whose times are known."""

from typing import Any

import pytest

from benchmarks.kernel_times import COPIES, REST, group_of, read_steps

NUM_STEPS, STEP_US = 5, 1000.0
FLASH = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<cutlass::bfloat16_t>>>"
IN_A_STEP = {
    "_prepare_inputs": ("kernel", 0, 10),
    FLASH: ("kernel", 10, 90),
    "nvjet_tst_64x8_64x16_2x4_h_bz_TNT": ("kernel", 100, 400),
    "_lora_shrink_kernel": ("kernel", 450, 100),  # half of it beside the product
    "_gumbel_sample_kernel": ("kernel", 700, 50),
    "Memcpy DtoH (Device -> Pinned)": ("gpu_memcpy", 760, 40),
}
"""Category, begin and duration of each, in microseconds."""


def event(name: str, category: str, begin_us: float, duration_us: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": 7e9 + begin_us, "dur": duration_us, "pid": 0, "tid": 7}


def trace(late_us: float = 0) -> list[dict[str, Any]]:
    """Return steps with equal kernels, of which the first is longer by `late_us`, and with what the host did."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    for step in range(NUM_STEPS):
        begins_us = step * STEP_US + (late_us if step else 0)
        events.append(event("cudaGraphLaunch", "cuda_runtime", begins_us, 900))
        events += [event(name, kind, begins_us + begin, took) for name, (kind, begin, took) in IN_A_STEP.items()]
        events.append(event("execute_context_0(0)_generation_4(4)", "gpu_user_annotation", begins_us, 600))
    return events


def test_a_step_is_divided_among_the_groups_of_its_kernels_and_idle_time() -> None:
    found = read_steps(trace(), NUM_STEPS)
    assert found is not None
    assert found.step_ms == pytest.approx(1.0)
    groups = {"attention": 0.09, "products": 0.4, "LoRA": 0.1, "norms": 0, "sampling": 0.05, COPIES: 0.04, REST: 0.01}
    assert {name: found.group_ms(name) for name in groups} == pytest.approx(groups)
    assert found.busy_ms == pytest.approx(0.64), "50 of the 690 us of kernels are beside others"
    assert found.idle_ms == pytest.approx(0.36)
    assert next(iter(found.kernels)).startswith("nvjet") and found.kernels[FLASH].launches == 1


def test_the_step_that_waits_for_the_profiler_is_not_counted() -> None:
    found = read_steps(trace(late_us=50_000), NUM_STEPS)
    assert found is not None and found.marker == "_prepare_inputs"
    assert found.step_ms == pytest.approx(1.0) and found.steps_ms == pytest.approx([1.0] * (NUM_STEPS - 2))


def test_without_a_kernel_of_each_step_the_whole_trace_is_divided() -> None:
    found = read_steps(trace(), 2 * NUM_STEPS)
    assert found is not None and found.marker is None and found.steps_ms == []
    assert found.step_ms == pytest.approx((4 * STEP_US + 800) / 10 / 1e3)
    assert found.busy_ms == pytest.approx(0.32)


def test_a_trace_of_the_host_alone_has_no_steps() -> None:
    assert read_steps([event("aten::mm", "cpu_op", 0, 10)], NUM_STEPS) is None


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_lora_expand_kernel", "LoRA"),
        ("_fused_moe_lora_kernel", "LoRA"),
        ("void flash::FlashAttnFwdCombine<cute::tuple<cute::C<128>>>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "norms"),
        ("_add_and_norm", "norms"),
        ("_triton_mrope_forward", "norms"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>", "norms"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "products"),
        ("_topk_log_softmax_kernel", "sampling"),
        ("_ranks_kernel", "sampling"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
            "sampling",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>", REST),
        ("_compute_slot_mappings_kernel", REST),
    ],
)
def test_a_kernel_belongs_to_a_group_by_its_name(name: str, group: str) -> None:
    assert group_of(name) == group
