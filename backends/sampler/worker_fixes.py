"""Our changes inside vLLM 0.32's worker process.

vLLM mixes `WorkerExtension` into its worker class; the sampler process calls its methods by
`collective_rpc`. Both model runners are covered: V1 (CPU) and V2 (CUDA).
"""

from typing import Any

from vllm.lora.layers import LogitsProcessorWithLoRA

from backends.sampler.lora_fixes import PromptRows, replace_cpu_ops
from backends.sampler.prompt_columns import on_first_runner, on_second_runner


class WorkerExtension:
    """Methods added to vLLM's worker."""

    model_runner: Any
    use_v2_model_runner: bool

    def install_fixes(self) -> None:
        """Once, before the first request."""
        runner = self.model_runner
        if runner.device.type == "cpu":
            replace_cpu_ops()
        heads = [module for module in runner.get_model().modules() if isinstance(module, LogitsProcessorWithLoRA)]
        if len(heads) != 1:
            raise RuntimeError(f"expected one head that takes LoRA, found {len(heads)}")
        prompt_rows = PromptRows(heads[0].punica_wrapper)
        if self.use_v2_model_runner:
            worker = runner.prompt_logprobs_worker
            worker.compute_prompt_logprobs = prompt_rows.during(on_second_runner(worker), argument=1)
        else:
            runner._get_prompt_logprobs_dict = prompt_rows.during(on_first_runner(runner), argument=0)

    def ignored_modules(self, lora_id: int) -> list[str]:
        """Modules of a loaded adapter that no layer of the engine takes up; vLLM passes over them in silence."""
        manager = self.model_runner.lora_manager._adapter_manager
        return sorted(set(manager.get_adapter(lora_id).loras) - set(manager.modules))
