"""vLLM's worker with our changes, named in the engine argument `worker_cls`.

Importing this file applies the changes that the engine's process needs before its scheduler and its model are made. The
sampler process calls the worker's own methods by `collective_rpc`. Both model runners are covered: V1 (CPU) and V2
(CUDA).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from vllm.config import set_current_vllm_config
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager, backend_xgrammar

from tinker_server.backends.families import engine as of_kinds
from tinker_server.backends.formats.stacked_adapters import open_adapter
from tinker_server.backends.model_spec import DRAWN_TOKENS, ENGINE_GRAPHS_BYTES
from tinker_server.backends.patches import for_device, require_as_written
from tinker_server.backends.processes.heap import give_back_memory
from tinker_server.backends.sampler.engine.grammars import BoundedGrammar, once_each, with_owners
from tinker_server.backends.sampler.engine.vllm_patches import prompt_scores, targets
from tinker_server.backends.sampler.engine.vllm_patches.block_fp8 import read_fp8
from tinker_server.backends.sampler.engine.vllm_patches.delta_rule import keep_delta_rule_sizes
from tinker_server.backends.sampler.engine.vllm_patches.float32_residual import mark, register_norms
from tinker_server.backends.sampler.engine.vllm_patches.gated_norms import keep_gated_norms
from tinker_server.backends.sampler.engine.vllm_patches.heads import widen_heads
from tinker_server.backends.sampler.engine.vllm_patches.lora import Slots, WorkerAdapters, kernels_with_prompt_rows
from tinker_server.backends.sampler.engine.vllm_patches.lora_tiles import set_tiles
from tinker_server.backends.sampler.engine.vllm_patches.mapped_weights import choose_socket, map_weights
from tinker_server.backends.sampler.engine.vllm_patches.phases import Phases
from tinker_server.backends.sampler.engine.vllm_patches.placeholders import hide_from_v1, patch_v2_draws
from tinker_server.backends.sampler.engine.vllm_patches.prefill_graphs import (
    IMAGES,
    capture_both_kinds,
    schedule_in_the_kernels,
)
from tinker_server.backends.sampler.engine.vllm_patches.routed_experts import RoutingOnCPU, allow_on_cpu
from tinker_server.backends.sampler.engine.vllm_patches.whole_images import keep_images_whole

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker

    from tinker_server.backends.sampler.engine.vllm_patches.cpu import patch_cpu, share_on_cpu
    from tinker_server.backends.sampler.engine.vllm_patches.cpu_images import attend_to_images_on_cpu
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    from tinker_server.backends.sampler.engine.vllm_patches.shared_factors import SharedFactors

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def _count_batch(core: "EngineCore") -> tuple[int, int, float]:
    """Return how many sequences run and wait, and the part of the KV cache that they hold."""
    return *core.scheduler.get_request_counts(), core.scheduler.get_kv_cache_usage()


def _patch_process() -> None:
    is_cpu = current_platform.is_cpu()
    require_as_written(for_device(targets.PATCHES, "cpu" if is_cpu else "cuda"))
    # Read by scheduler and worker when they are made, in this process or in one each (`executor.py`).
    targets.KV_CACHE_ZEROING.replace(property(lambda self: True))
    targets.PIN_FILES.replace(False)
    targets.PIN_MERGED.replace(False)
    targets.ADAPTER_FILES.replace(SimpleNamespace(safe_open=open_adapter))
    targets.WORKER_ADAPTERS.replace(WorkerAdapters)
    targets.GRAMMARS.replace(BoundedGrammar)
    targets.GRAMMAR_OWNERS.replace(with_owners(StructuredOutputManager._create_grammar))
    targets.GRAMMAR_CHECKS.replace(once_each(backend_xgrammar.validate_xgrammar_grammar))
    targets.COUNT_BATCH.replace(_count_batch)
    register_norms()
    for patch in of_kinds.OF_PROCESS:
        patch()
    read_fp8()
    widen_heads()
    keep_images_whole()
    if is_cpu:
        patch_cpu()
        attend_to_images_on_cpu()
        allow_on_cpu()
    else:
        targets.PUNICA.replace(kernels_with_prompt_rows(SharedFactors))
        set_tiles()
        capture_both_kinds()
        schedule_in_the_kernels()


_patch_process()


class Worker(VllmWorker):  # type: ignore[misc]
    """vLLM's worker, and methods for the sampler process."""

    phases: Phases
    """What it has done since it was made."""
    steps_done = 0
    """Steps in which the model computed something."""
    routing: RoutingOnCPU | None = None

    def init_device(self) -> None:
        """Begin on the device, and join the other ranks."""
        self.phases = Phases()
        self.phases.begin("begins on its device")
        if self.vllm_config.load_config.load_format == "ipc_cache":
            choose_socket(self.vllm_config.load_config, self.rank)
        super().init_device()

    def initialize_from_config(self, kv_cache_config: object) -> None:
        """Make the KV cache."""
        self.phases.begin("makes the KV cache")
        super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> object:
        """Run each kernel once, then capture the graphs."""
        self.phases.begin("warms kernels up")
        capture = self.model_runner.capture_model

        def note_and_capture() -> object:
            self.phases.begin("captures graphs")
            return capture()

        self.model_runner.capture_model = note_and_capture
        try:
            return super().compile_or_warm_up_model()
        finally:
            self.model_runner.capture_model = capture

    def phase_ages(self) -> list[tuple[str, float]]:
        """Return the phases of the start, each with the seconds since it began."""
        return self.phases.ages()

    def load_model(self, **kwargs: object) -> None:
        """Load the model, or map its weights, and mark the norms that add in float32."""
        self.phases.begin("reads weights")
        keep_gated_norms()
        if not current_platform.is_cpu():
            keep_delta_rule_sizes()
        if self.vllm_config.load_config.load_format == "ipc_cache":
            map_weights()
            if current_platform.is_cpu():
                share_on_cpu()
                self.vllm_config.load_config.device = "cpu:0"  # else the loader asks for the number of the GPU
        with self._use_served_context():
            super().load_model(**kwargs)
        mark(self.model_runner.get_model())
        for patch in of_kinds.OF_MODEL:
            patch(self.model_runner.get_model())

    @contextmanager
    def _use_served_context(self) -> Iterator[None]:
        """Inside, the longest sequence is the served context: some rotary embeddings (longrope) take other frequencies
        beyond a length, and would for the one token more that is never computed."""
        model_config = self.vllm_config.model_config
        model_config.max_model_len -= DRAWN_TOKENS
        try:
            yield
        finally:
            model_config.max_model_len += DRAWN_TOKENS

    def determine_available_memory(self) -> int:
        """Return the bytes of the KV cache.

        vLLM compares the GPU's free memory before and after its largest step. It would take for its own what a trainer
        or another engine fills meanwhile, and ends if one of them gives memory back. Torch's counters are of this
        process alone. They do not count weights that are mapped, and neither does `requested_memory`.
        """
        self.phases.begin("measures memory")
        if current_platform.is_cpu() or self.cache_config.kv_cache_memory_bytes:
            return int(super().determine_available_memory())
        torch.cuda.reset_peak_memory_stats()
        # As in vLLM: small allocations must not keep large freed blocks from being given back.
        with set_current_vllm_config(self.vllm_config), self._scoped_allocator_max_split(max_split_size_mb=20):
            self.model_runner.profile_run(randomize_inputs=self.randomize_dummy_inputs)
        of_step = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        return int(self.requested_memory) - torch.cuda.memory_reserved() - of_step - ENGINE_GRAPHS_BYTES

    @torch.inference_mode()  # type: ignore[untyped-decorator, unused-ignore]
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Compute a step, and count it."""
        IMAGES.record_step(scheduler_output)
        if self.routing is not None:
            self.routing.begin_step(scheduler_output)
        output: ModelRunnerOutput | AsyncModelRunnerOutput | None = super().execute_model(scheduler_output)
        self.steps_done += scheduler_output.total_num_scheduled_tokens > 0
        return output

    @torch.inference_mode()  # type: ignore[untyped-decorator, unused-ignore]
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the step's tokens."""
        sample_tokens = super().sample_tokens
        with nullcontext() if self.use_v2_model_runner else self._without_cut_prompts():
            if self.routing is None:
                return sample_tokens(grammar_output)
            return self.routing.sample(sample_tokens, grammar_output)

    @contextmanager
    def _without_cut_prompts(self) -> Iterator[None]:
        """Inside, requests whose prompt goes on in the next step have no generator of their own. What is drawn for them
        is dropped, and vLLM's V1 runner would set their generator back, which a CPU's cannot (vLLM 0.32)."""
        batch, runner = self.model_runner.input_batch, self.model_runner
        cut = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        held = {row: batch.generators.pop(row) for row in cut if row in batch.generators}
        try:
            yield
        finally:
            batch.generators.update(held)

    def attempt(self, method: str, args: Sequence[object], kwargs: dict[str, object]) -> tuple[str | None, object]:
        """Return the error of a method, or None, and its answer (`executor.py`)."""
        try:
            return None, getattr(self, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised again by the executor
            return str(error).strip() or type(error).__name__, None

    def patch_runner(self, placeholder_ids: Sequence[int]) -> None:
        """Change the model runner. Once, before the first request. `placeholder_ids` are never sampled."""
        runner = self.model_runner
        parallel = runner.parallel_config
        if parallel.world_size != 1 and parallel.distributed_executor_backend != targets.EXECUTOR:
            raise RuntimeError("the scheduler is in another process, where blocks of the KV cache are not cleared")
        prompt_rows = self._prompt_rows_of_head()
        ids = torch.tensor(placeholder_ids, dtype=torch.int64, device=runner.device)
        if self.use_v2_model_runner:
            patch_v2_draws(ids)
            worker = runner.prompt_logprobs_worker
            scoring = prompt_scores.ScoringWorker(worker.max_num_reqs, worker.device, worker.logprobs_mode)
            scoring.prompt_rows = prompt_rows
            runner.prompt_logprobs_worker = scoring
            targets.V2_CHUNK.replace(prompt_scores.ROWS_AT_ONCE)
            return
        step = prompt_scores.scoring_step_v1(runner, runner._get_prompt_logprobs_dict, prompt_rows)
        targets.V1_PROMPT_LOGPROBS.replace(step, on=runner)
        if placeholder_ids:
            hide_from_v1(runner.sampler, ids)
        if runner.vllm_config.aux_output_config.enabled:
            self.routing = RoutingOnCPU(runner)

    def _prompt_rows_of_head(self) -> prompt_scores.PromptRows:
        """Return what tells the LoRA kernels of the model's head that its rows are prompt tokens."""
        heads = [
            module for module in self.model_runner.get_model().modules() if isinstance(module, LogitsProcessorWithLoRA)
        ]
        if len(heads) != 1:
            raise RuntimeError(f"expected one head that takes LoRA, found {len(heads)}")
        prompt_rows: prompt_scores.PromptRows = heads[0].punica_wrapper.prompt_rows
        return prompt_rows

    @property
    def _slots(self) -> Slots:
        slots: Slots = self.model_runner.lora_manager._adapter_manager
        return slots

    def count_steps(self) -> int:
        """Return the number of steps in which the model computed something."""
        return self.steps_done

    def give_back_memory(self) -> None:
        """Give memory that the engine's process has freed back to the system."""
        give_back_memory()

    def load_adapter(self, name: str, lora_id: int, path: str) -> list[str]:
        """Load an adapter and return its modules that no layer of the engine takes, over which vLLM passes silently.

        Raises RuntimeError where the engine's slot does not hold what the files say.
        """
        self.model_runner.add_lora(LoRARequest(name, lora_id, path))
        self._slots.check.require_right(lora_id)
        return sorted(set(self._slots.get_adapter(lora_id).loras) - set(self._slots.modules))
