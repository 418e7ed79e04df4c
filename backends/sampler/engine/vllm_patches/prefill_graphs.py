"""CUDA graphs for the engine's steps that hold a prompt, as for those that only decode.

Launching a short prompt's kernels one by one takes 75 ms on an H200 for a model of 4 billion parameters, and 17 ms from
a graph; whoever decodes in the same step waits as long. vLLM 0.32 captures graphs of both kinds of step only with its
torch.compile, or (`FULL`) graphs of a kind that serves both, and decodes more slowly.

Prompts with images run eagerly. Buffers for features of the first decoder layers are cleared only if non-empty, and
they are empty at capture: a captured graph would leak one prompt's image features into the next step.

The schedule of FlashAttention 3 (`get_scheduler_metadata`), which vLLM writes into the graph's buffer before each step,
has one array more for causal attention. A step in which every request has one token is not causal to it, unless a head
has 65 to 128 numbers. Replayed in a graph captured for longer prompts, its attention finds the arrays elsewhere and
leaves its output unwritten, for all requests of the step.
"""

from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from tinker_server.backends.sampler.engine.vllm_patches import targets

if TYPE_CHECKING:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

TOKENS = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""Sizes of graphs for a step with a prompt, which takes the next larger one."""

Graphs = list[BatchExecutionDescriptor]
Candidates = dict[tuple[int, int], Graphs]
"""Graphs that may serve a step, the best first, by its tokens and adapters."""


class StepsWithImages:
    """Knows whether a request with images is in the engine's next step."""

    def __init__(self) -> None:
        self._requests: set[str] = set()
        self.is_next = False

    def record_step(self, step: SchedulerOutput) -> None:
        """Record a step before it is computed."""
        self._requests -= step.finished_req_ids
        self._requests |= {request.req_id for request in step.scheduled_new_reqs if request.mm_features}
        self.is_next = not self._requests.isdisjoint(step.num_scheduled_tokens)


IMAGES = StepsWithImages()
"""The steps of this process's engine."""


def capture_both_kinds() -> None:
    """Give steps that only decode graphs of their own in the mode `FULL`, which an engine keeps where its attention
    can.

    Once, before the engine is made.
    """

    def list_both(manager: CudaGraphManager) -> None:
        if manager.cudagraph_mode is not CUDAGraphMode.FULL:
            list_graphs(manager)
            return
        config, sizes = manager.compilation_config, manager.compilation_config.cudagraph_capture_sizes

        def list_for(mode: CUDAGraphMode, of_sizes: list[int]) -> tuple[Graphs, Candidates]:
            manager.cudagraph_mode, config.cudagraph_capture_sizes = mode, of_sizes
            manager._candidates = {}
            list_graphs(manager)
            return manager._capture_descs[CUDAGraphMode.FULL], manager._candidates

        try:
            any_step, for_any = list_for(CUDAGraphMode.FULL, [size for size in TOKENS if size <= max(sizes)])
            decoding, for_decoding = list_for(CUDAGraphMode.FULL_DECODE_ONLY, sizes)
        finally:
            manager.cudagraph_mode, config.cudagraph_capture_sizes = CUDAGraphMode.FULL, sizes
        largest_first = sorted([*any_step, *decoding], key=lambda graph: -graph.num_tokens)
        manager._capture_descs = {CUDAGraphMode.FULL: largest_first}
        manager._candidates = {
            key: [*for_decoding.get(key, []), *for_any.get(key, [])] for key in for_any | for_decoding
        }

    def choose_without_images(
        manager: CudaGraphManager, num_reqs: int, num_tokens: int, *args: object, **kwargs: object
    ) -> BatchExecutionDescriptor:
        graph = choose(manager, num_reqs, num_tokens, *args, **kwargs)
        if IMAGES.is_next and graph.cg_mode is CUDAGraphMode.FULL and graph.uniform_token_count is None:
            return BatchExecutionDescriptor(
                CUDAGraphMode.NONE, num_tokens, num_reqs, num_active_loras=graph.num_active_loras
            )
        return graph

    list_graphs = targets.V2_GRAPHS.replace(list_both)
    choose = targets.V2_DISPATCH.replace(choose_without_images)


def schedule_in_the_kernels() -> None:
    """Have FlashAttention's kernels make the schedules whose layout would depend on the step: each as it was captured.

    Once, before the engine is made.
    """

    def schedule(builder: "FlashAttentionMetadataBuilder", *, aot_schedule: bool, **sizes: Any) -> object:
        is_always_causal = 64 < builder.headdim <= 128
        return made_by_vllm(builder, aot_schedule=aot_schedule and is_always_causal, **sizes)

    made_by_vllm = targets.FLASH_SCHEDULE.replace(schedule)
