"""One scenario through one SDK's public API: python client.py BASE_URL WORK.json RESULT.json

Writes what came back. Runs under every SDK of the matrix, in that SDK's own environment: it imports nothing but
the SDK and numpy.
"""

import base64
import json
import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types


def main(base_url: str, work: dict[str, Any]) -> dict[str, Any]:
    """Everything a training script does, in one session."""
    service = tinker.ServiceClient(base_url=base_url, api_key="tml-matrix")
    seen: dict[str, Any] = {
        "models": [model.model_name for model in service.get_server_capabilities().supported_models]
    }
    client = ready(service.create_lora_training_client(work["model"], rank=work["rank"], seed=work["seed"]))
    seen["info"] = info(client)
    seen["steps"] = [step(client, batch) for batch in work["batches"]]
    seen["trained"] = forward(client, work["batches"][0])
    path = client.save_state("matrix").result().path
    seen["sampled from a checkpoint"], seen["sampled from a snapshot"] = sample_both(service, client, work)

    resumed = ready(service.create_training_client_from_state_with_optimizer(path))
    restarted = ready(service.create_training_client_from_state(path))
    for name, model in ("original", client), ("resumed", resumed), ("restarted", restarted):
        seen[name] = {
            "info": info(model),
            "at once": forward(model, work["batches"][0]),
            "step": step(model, work["batches"][1]),
            "later": forward(model, work["batches"][0]),
        }
    seen["records"] = records(service, client, path)
    return seen


def ready(client: Any) -> Any:
    """Later versions return a future that also acts as the client, earlier ones the client itself."""
    return client.result() if hasattr(client, "result") else client


def step(client: Any, batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Both submitted before either is awaited, as recipes do."""
    forward_backward = client.forward_backward([datum(one) for one in batch], "cross_entropy")
    optim_step = client.optim_step(types.AdamParams(learning_rate=3e-3))
    result = scores(forward_backward.result())
    optim_step.result()
    return result


def forward(client: Any, batch: list[dict[str, Any]]) -> dict[str, Any]:
    return scores(client.forward([datum(one) for one in batch], "cross_entropy").result())


def scores(output: Any) -> dict[str, Any]:
    return {
        "loss": output.metrics["loss:sum"],
        "logprobs": [row["logprobs"].tolist() for row in output.loss_fn_outputs],
        "losses": [row["elementwise_loss"].tolist() for row in output.loss_fn_outputs],
    }


def sample_both(service: Any, client: Any, work: dict[str, Any]) -> list[Any]:
    """From weights that were saved under a name, and from those saved for this session only."""
    path = client.save_weights_for_sampler("matrix").result().path
    named = ready(service.create_sampling_client(model_path=path))
    unnamed = ready(client.save_weights_and_get_sampling_client())
    return [[sample(sampler, prompt) for prompt in work["prompts"]] for sampler in (named, unnamed)]


def sample(sampler: Any, prompt: list[dict[str, Any]]) -> dict[str, Any]:
    response = sampler.sample(
        model_input(prompt),
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=8, seed=7, temperature=0.9, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    return {
        "tokens": [list(sequence.tokens) for sequence in response.sequences],
        "logprobs": [list(sequence.logprobs) for sequence in response.sequences],
        "stop reasons": [sequence.stop_reason for sequence in response.sequences],
        "prompt logprobs": response.prompt_logprobs,
        "topk prompt logprobs": response.topk_prompt_logprobs,
        "computed logprobs": sampler.compute_logprobs(model_input(prompt)).result(),
    }


def info(client: Any) -> dict[str, Any]:
    answer = client.get_info()
    return {"model": answer.model_data.model_name, "is_lora": answer.is_lora, "rank": answer.lora_rank}


def records(service: Any, client: Any, path: str) -> dict[str, Any]:
    """Answers that the REST client of every version can get, without ids of sessions, which differ."""
    rest = service.create_rest_client()
    run_id = client.get_info().model_id
    run = rest.get_training_run(run_id).result()
    weights = rest.get_weights_info_by_tinker_path(path).result()
    checkpoints = rest.list_checkpoints(run_id).result().checkpoints
    rest.publish_checkpoint_from_tinker_path(path).result()
    published = rest.list_checkpoints(run_id).result().checkpoints
    rest.delete_checkpoint_from_tinker_path(path).result()
    remaining = rest.list_checkpoints(run_id).result().checkpoints
    return {
        "run": {"model": run.base_model, "is_lora": run.is_lora, "rank": run.lora_rank},
        "weights": {"model": weights.base_model, "is_lora": weights.is_lora, "rank": weights.lora_rank},
        "checkpoints": sorted([one.checkpoint_id, one.checkpoint_type, one.public] for one in checkpoints),
        "published": sorted([one.checkpoint_id, one.public] for one in published),
        "remaining": sorted(one.checkpoint_id for one in remaining),
    }


def datum(one: dict[str, Any]) -> types.Datum:
    return types.Datum(
        model_input=model_input(one["chunks"]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(one["targets"], np.int64)),
            "weights": types.TensorData.from_numpy(np.array(one["weights"], np.float32)),
        },
    )


def model_input(chunks: list[dict[str, Any]]) -> types.ModelInput:
    return types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=chunk["tokens"])
            if "tokens" in chunk
            else types.ImageChunk(
                data=base64.b64decode(chunk["png"]), format="png", expected_tokens=chunk["expected_tokens"]
            )
            for chunk in chunks
        ]
    )


def plain(value: Any) -> Any:
    """JSON has neither tuples, numpy scalars nor NaN; versions differ in which of them they return."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    base_url, work_file, result_file = sys.argv[1:]
    result = {
        "version": metadata.version("tinker"),
        "seen": plain(main(base_url, json.loads(Path(work_file).read_text()))),
    }
    Path(result_file).write_text(json.dumps(result, allow_nan=False))
