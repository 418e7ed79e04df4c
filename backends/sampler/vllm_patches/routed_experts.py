"""Which experts the engine sent tokens to: asked of vLLM 0.32, kept for the trainer (`formats/expert_routing.py`).

Of its two model runners the first, which computes on the CPU, does not tell; there the same parts of vLLM are put
around it.

T tokens, L layers of the decoder, K experts of a token
"""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
from vllm.outputs import CompletionOutput

from backends.formats.expert_routing import RoutingFiles, routing_name
from backends.inputs.rendering import Rendered
from backends.protocol import BackendFailed

log = logging.getLogger(__name__)


def allow_on_cpu() -> None:
    """Once in the engine's process and in the one that starts it: vLLM refuses to tell for a runner that does not."""
    VllmConfig._verify_aux_output_compatibility = lambda self: None


def keep_routing(
    files: RoutingFiles, owner: str, model_id: str, rendered: Rendered, outputs: Sequence[CompletionOutput]
) -> None:
    """Of a prompt and each of its samples. The last token drawn was sent nowhere yet. A full disk fails no sample."""
    for output in outputs:
        fed = output.token_ids[:-1]
        num_tokens, experts_TLK = len(rendered.token_ids_T) + len(fed), output.routed_experts
        if experts_TLK is None or len(experts_TLK) < num_tokens:
            told = 0 if experts_TLK is None else len(experts_TLK)
            raise BackendFailed(f"the engine told the experts of {told} tokens where {num_tokens} were due")
        try:
            files.write(routing_name(owner, model_id, rendered, fed), experts_TLK[:num_tokens])
        except OSError as error:
            log.warning("what experts were sampled is not kept: %s", error)


def on_first_runner(runner: Any) -> None:
    """Has the runner tell, as vLLM's second does by itself."""
    connector = AuxOutputWorkerConnector(
        vllm_config=runner.vllm_config, model=runner.get_model(), kv_cache_config=runner.kv_cache_config
    )
    execute, draw = runner.execute_model, runner.sample_tokens

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(scheduler_output, *args, **kwargs)

    def sample_tokens(grammar_output: Any) -> Any:
        if runner.execute_model_state is None:
            return draw(grammar_output)
        rows = runner.input_batch
        num_rows = rows.num_reqs
        batch = SimpleNamespace(
            req_ids=rows.req_ids,
            query_start_loc_np=runner.query_start_loc.np[: num_rows + 1].copy(),
            num_computed_tokens_np=rows.num_computed_tokens_cpu[:num_rows].copy(),
        )
        pending = connector.prepare_output(batch)
        output = draw(grammar_output)
        if pending is not None:
            num_drawn = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_drawn, np.zeros_like(num_drawn))
            output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
