"""Our changes inside vLLM 0.32's worker process.

vLLM mixes `WorkerExtension` into its worker class; the sampler process calls its methods by
`collective_rpc`. Both model runners are covered: V1 (CPU) and V2 (CUDA).
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora import lora_model, model_manager
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu.sample import sampler as second_sampler

from backends.formats.stacked_adapters import open_adapter
from backends.processes.heap import give_back_memory
from backends.sampler.grammars import bound_steps
from backends.sampler.slot_check import SlotCheck
from backends.sampler.vllm_patches import placeholders, prompt_scores, routed_experts
from backends.sampler.vllm_patches.expert_stacks import take_expert_stacks
from backends.sampler.vllm_patches.experts_on_cpu import replace_experts
from backends.sampler.vllm_patches.float32_residual import keep_in_float32
from backends.sampler.vllm_patches.linear_attention_on_cpu import copy_single_rows
from backends.sampler.vllm_patches.lora import (
    PromptRows,
    name_tower_attention,
    replace_cpu_ops,
    take_heads_beside_decoders,
)
from backends.sampler.vllm_patches.prefill_graphs import IMAGES, record_both_kinds

# vLLM clears reused blocks of its KV cache for some models only. Attention multiplies what a block held before by
# zero, and zero times the NaN of a tenant whose adapter has diverged is NaN for the next one. Read by scheduler and
# worker when they are made, after vLLM has imported this file; both live in this process.
KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)
# vLLM pins the memory of each of a new adapter's tensors: 0.2 s for 500 of them, on an H100, to save 0.02 s whenever
# they are copied there.
lora_model.PIN_MEMORY = model_manager.PIN_MEMORY = False
# Of adapters that the trainer beside us has written in stacks, vLLM sees each tensor under its own name.
lora_model.safetensors = SimpleNamespace(safe_open=open_adapter)
name_tower_attention()
take_heads_beside_decoders()
keep_in_float32()
bound_steps()
if current_platform.is_cpu():
    replace_experts()
    copy_single_rows()
    routed_experts.allow_on_cpu()
else:
    record_both_kinds()


def _count_batch(core: Any) -> tuple[int, int, float]:
    """Sequences that run and wait, and the part of the KV cache that they hold."""
    return *core.scheduler.get_request_counts(), core.scheduler.get_kv_cache_usage()


# vLLM tells these with its statistics alone, which cost something for each sequence in each step and bring a second
# set of Prometheus' metrics. Asked for as a method of the engine's core, they cost nothing until somebody wants them.
EngineCore.count_batch = _count_batch


def _keep_draws_in_vocabulary() -> None:
    """Changes the function by which the V2 runner (CUDA) draws.

    Of scores that are NaN, as a diverged adapter's are, it draws tokens beyond the vocabulary, and their embedding ends
    the engine for everybody. The log probability of what is drawn instead stays NaN, and is told by name.
    """
    draw: Callable[..., torch.Tensor] = second_sampler.gumbel_sample

    def gumbel_sample(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return draw(logits, *args, **kwargs).clamp_(0, logits.shape[1] - 1)

    second_sampler.gumbel_sample = gumbel_sample


def _unchanged(step: Callable[..., Any], argument: int) -> Callable[..., Any]:
    """In place of `PromptRows.during`, of an engine without adapters."""
    return step


class WorkerExtension:
    """Methods added to vLLM's worker."""

    model_runner: Any
    use_v2_model_runner: bool
    steps_done: int
    slot_check: SlotCheck

    def install_fixes(self, placeholder_ids: Sequence[int], takes_adapters: bool) -> None:
        """Once, before the first request. `placeholder_ids` are never drawn."""
        runner = self.model_runner
        if runner.parallel_config.world_size != 1:
            raise RuntimeError("the scheduler is in another process, where blocks of the KV cache are not cleared")
        during = self._fix_adapters(runner) if takes_adapters else _unchanged
        self._watch_steps(runner)
        columns = torch.tensor(placeholder_ids, dtype=torch.int64, device=runner.device)
        if self.use_v2_model_runner:
            _keep_draws_in_vocabulary()
            worker = runner.prompt_logprobs_worker
            scores = prompt_scores.on_second_runner(worker)
            worker.compute_prompt_logprobs = during(scores, argument=1)
            prompt_logprob.CHUNK_SIZE = prompt_scores.ROWS_AT_ONCE
            if placeholder_ids:
                placeholders.on_second_runner(columns)
        else:
            scores = prompt_scores.on_first_runner(runner)
            runner._get_prompt_logprobs_dict = during(scores, argument=0)
            if placeholder_ids:
                placeholders.on_first_runner(runner.sampler, columns)
            if runner.vllm_config.aux_output_config.enabled:
                routed_experts.on_first_runner(runner)

    def _fix_adapters(self, runner: Any) -> Callable[..., Any]:
        """`PromptRows.during` of the model's head."""
        if runner.device.type == "cpu":
            replace_cpu_ops()
        heads = [module for module in runner.get_model().modules() if isinstance(module, LogitsProcessorWithLoRA)]
        if len(heads) != 1:
            raise RuntimeError(f"expected one head that takes LoRA, found {len(heads)}")
        manager = runner.lora_manager._adapter_manager
        take_expert_stacks(manager)
        self.slot_check = SlotCheck(runner.lora_manager)
        # Of some models (Mistral, Gemma) vLLM wraps the head, and then refuses files that have an adapter for it.
        loadable = manager.supported_lora_modules
        loadable += ["lm_head"] if "lm_head" not in loadable else []
        return PromptRows(heads[0].punica_wrapper).during

    def _watch_steps(self, runner: Any) -> None:
        execute, self.steps_done = runner.execute_model, 0

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            IMAGES.note(scheduler_output)
            answer = execute(scheduler_output, *args, **kwargs)
            self.steps_done += scheduler_output.total_num_scheduled_tokens > 0
            return answer

        runner.execute_model = watched

    def count_steps(self) -> int:
        """Steps in which the model computed something."""
        return self.steps_done

    def give_back_memory(self) -> None:
        """What the engine's process has freed."""
        give_back_memory()

    def take_model(self, path: str) -> list[str]:
        """Read another whole model into the place of the one at hand; parameters that its files lack, which vLLM
        passes over with a line in its log."""
        model = self.model_runner.get_model()
        read, found = model.load_weights, set()

        def noted(weights: Any) -> Any:
            names = read(weights)
            found.update(names)
            return names

        model.load_weights = noted
        try:
            self.model_runner.reload_weights(weights_path=path)
        finally:
            del model.load_weights
        return sorted({name for name, _ in model.named_parameters()} - found)

    def load_adapter(self, name: str, lora_id: int, path: str) -> list[str]:
        """Modules of the adapter that no layer of the engine takes up; vLLM passes over them in silence. Raises
        RuntimeError where the engine's slot does not hold what the files say."""
        self.model_runner.add_lora(LoRARequest(name, lora_id, path))
        self.slot_check.require_right(lora_id)
        manager = self.model_runner.lora_manager._adapter_manager
        return sorted(set(manager.get_adapter(lora_id).loras) - set(manager.modules))
