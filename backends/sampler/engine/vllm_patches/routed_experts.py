"""The experts that the engine sent tokens to: requested of vLLM 0.32, kept for the trainer
(`formats/expert_routing.py`).

vLLM's V1 model runner, which computes on the CPU, does not return them; there the parts of vLLM that its V2 model
runner uses are put around it.

T tokens, L layers of the decoder, K experts of a token
"""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
from vllm.outputs import CompletionOutput
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tinker_server.api_schemas.ids import sequence_id
from tinker_server.backends.formats.expert_routing import (
    NamedSequence,
    RoutingFiles,
    identities,
    routing_name,
    sequence_name,
)
from tinker_server.backends.inputs.rendering import Rendered
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.sampler.engine.vllm_patches import targets

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

log = logging.getLogger(__name__)


def allow_on_cpu() -> None:
    """Have vLLM's configuration accept the request on the CPU. Once, in the process that makes the configuration."""
    targets.CPU_ROUTING.replace(lambda self: None)


def keep_routing(
    files: RoutingFiles,
    of: tuple[str, str, str],
    rendered: Rendered,
    outputs: Sequence[CompletionOutput],
    first: int = 0,
) -> None:
    """Keep the experts of a prompt and each of its samples, from the number `first` on; `of`: owner, model and request.
    The last sampled token was not sent anywhere yet.

    A full disk fails no sample.
    """
    owner, model_id, request_id = of
    for index, output in enumerate(outputs, first):
        fed = output.token_ids[:-1]
        num_tokens, experts_TLK = len(rendered.token_ids_T) + len(fed), output.routed_experts
        if experts_TLK is None or len(experts_TLK) < num_tokens:
            returned = 0 if experts_TLK is None else len(experts_TLK)
            raise BackendFailed(f"the engine returned the experts of {returned} tokens where {num_tokens} were due")
        try:
            sequence = None
            if request_id:
                tokens_T = identities(rendered, output.token_ids)
                name = sequence_name(owner, sequence_id(request_id, index))
                sequence = NamedSequence(name, tokens_T, len(rendered.token_ids_T))
            files.write(routing_name(owner, model_id, rendered, fed), experts_TLK[:num_tokens], sequence)
        except OSError as error:
            log.warning("dropping the expert routing of a sample: %s", error)


class RoutingOnCPU:
    """Has the V1 model runner return routed experts, as vLLM's V2 does by itself."""

    def __init__(self, runner: "GPUModelRunner") -> None:
        self._runner = runner
        self._connector = AuxOutputWorkerConnector(
            vllm_config=runner.vllm_config, model=runner.get_model(), kv_cache_config=runner.kv_cache_config
        )

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Note a step before it is computed."""
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)

    def sample(
        self, sample_tokens: Callable[[GrammarOutput | None], ModelRunnerOutput], grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput:
        """Return the step's output, with the experts of its tokens."""
        if self._runner.execute_model_state is None:
            return sample_tokens(grammar_output)
        rows = self._runner.input_batch
        num_rows = rows.num_reqs
        batch = SimpleNamespace(
            req_ids=rows.req_ids,
            query_start_loc_np=self._runner.query_start_loc.np[: num_rows + 1].copy(),
            num_computed_tokens_np=rows.num_computed_tokens_cpu[:num_rows].copy(),
        )
        pending = self._connector.prepare_output(batch)
        output = sample_tokens(grammar_output)
        if pending is not None:
            num_sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output
