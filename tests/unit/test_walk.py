"""How many of our functions an operation calls on its way through the server, stage by stage: each is one more thing to
know for whoever follows it. The numbers may only fall."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

from tests.walking import Client, serving
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas import wire

SLACK = 3
"""Calls by which a ceiling may be too high."""
CEILINGS = {
    "forward_backward": (139, 15, 15, 9, 20),
    "optim_step": (99, 15, 15, 9, 18),
    "sample": (118, 14, 15, 4, 24),
}
"""The most calls of each operation in each of `STAGES`. Lower them with each change that makes the way shorter."""


def optim_step(model_id: str, seq_id: int) -> tuple[str, bytes, str]:
    adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
    adam["grad_clip_norm"] = 0.0
    body = {"model_id": model_id, "seq_id": seq_id, "type": "optim_step", "adam_params": adam}
    return "optim_step", json.dumps(body).encode(), wire.JSON


def forward_backward(model_id: str, seq_id: int) -> tuple[str, bytes, str]:
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\1\0\0\0"))
    target = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[1], dense=b"\1" + b"\0" * 7)
    datum = pb.Datum(model_input=[chunk], loss_fn_inputs={"target_tokens": target})
    body = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, data=[datum], loss_fn="cross_entropy")
    return "forward_backward", body.SerializeToString(), wire.PROTOBUF


def sample(sampler_id: str, seq_id: int) -> tuple[str, bytes, str]:
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "num_samples": 1,
    }
    return "asample", json.dumps(body).encode(), wire.JSON


Operation = Callable[[str, int], tuple[str, bytes, str]]
OPERATIONS: dict[str, Operation] = {
    "forward_backward": forward_backward,
    "optim_step": optim_step,
    "sample": sample,
}
NUMBERS = itertools.count(1)


async def test_an_operation_calls_no_more_functions_than_before(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        lanes = await _lanes(client)
        walks = {name: await _walk(client, operation, lanes[name]) for name, operation in OPERATIONS.items()}
    found = {name: tuple(map(len, walk.values())) for name, walk in walks.items()}
    longer = [
        f"{name}, {stage}: {len(calls)} calls, at most {ceiling} are allowed:\n" + "\n".join(calls)
        for name, walk in walks.items()
        for (stage, calls), ceiling in zip(walk.items(), CEILINGS[name], strict=True)
        if len(calls) > ceiling
    ]
    assert not longer, "\n\n".join(longer)
    spare = [most - n for name in found for n, most in zip(found[name], CEILINGS[name], strict=True)]
    assert max(spare) <= SLACK, f"the ways are shorter now: lower the ceilings to {found}"


async def _lanes(client: Client) -> dict[str, str]:
    """Make a model and a sampling session, and return the one that each operation belongs to."""
    session_id = (await client.post("create_session", sdk_version="0.38.0"))["session_id"]
    made = {"session_id": session_id, "base_model": "tiny"}
    created = await client.post("create_model", **made, model_seq_id=0, lora_config={"rank": 8})
    await client.complete(created)
    sampler = await client.post("create_sampling_session", **made, sampling_session_seq_id=0)
    model_id = f"{session_id}:train:0"
    return {"forward_backward": model_id, "optim_step": model_id, "sample": sampler["sampling_session_id"]}


async def _walk(client: Client, operation: Operation, lane: str) -> dict[str, list[str]]:
    """Return the calls of the third of three equal operations: the first ones also fill caches."""
    for _ in range(2):
        await client.operate(*operation(lane, next(NUMBERS)))
    return await client.walk_of(*operation(lane, next(NUMBERS)))
