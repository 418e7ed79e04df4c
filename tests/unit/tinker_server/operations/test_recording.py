"""Times that operations waited and ran, and metrics of tokens and GPUs."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.factories import batch, prompt, words
from tests.submitting import server
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from tinker_server.backends.configure.gpus import read_gpus
from tinker_server.backends.inputs.detokenize import TokenTexts
from tinker_server.backends.protocol import EncodedBatch
from tinker_server.dashboard.hints import hints
from tinker_server.embedded import DIRECTORIES, TINY_VL
from tinker_server.operations.recording import Recording
from tinker_server.store.catalog import Catalog
from tinker_server.store.database import Database
from tinker_server.store.futures.observers import Work
from tinker_server.store.futures.records import Operation, Result
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.records import Step
from tinker_server.store.steps import StepStore


def operation(kind: str, seq_id: int = 1, accepted_s_ago: float = 10) -> Operation:
    return Operation(kind, "m", seq_id, b"", "application/json", "alice", accepted_at=time.time() - accepted_s_ago)


async def recorded(db: Database, operation: Operation, output: ForwardBackwardOutput) -> Step:
    work: Work[None] = Work(operation, None, response=output)
    await Recording(StepStore(db)).on_success(work)
    assert work.step is not None
    return work.step


async def test_what_the_trainer_did_not_work_for_it_an_operation_has_waited(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        handle = client.services.scheduler.actor(client.model_id).model.handle
        client.trainer.gates["hold"].clear()
        request_id = await client.forward_backward(1, "hold")
        await asyncio.sleep(0.05)
        handle.worked_s += 0.02
        client.trainer.gates["hold"].set()
        step = (await client.result(request_id)).step
    assert step is not None
    assert step.run_s == pytest.approx(0.02)
    assert step.waited_s >= 0.05 - 0.02


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_an_operation_runs_for_as_long_as_it_takes_where_no_work_of_the_trainer_was_counted(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        client.trainer.gates["hold"].clear()
        request_id = await client.forward_backward(1, "hold")
        await asyncio.sleep(0.05)
        client.trainer.gates["hold"].set()
        step = (await client.result(request_id)).step
    assert step is not None
    assert step.run_s >= 0.04 and step.waited_s < 0.5


async def test_what_cannot_be_recorded_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StepStore, "last", None)
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        result = await client.result(await client.forward_backward(1))
    assert not result.failed and result.step is None
    assert f"forward_backward 1 of {client.model_id} is not recorded" in caplog.text


async def test_numbers_that_are_not_finite_are_left_out(db: Database) -> None:
    metrics = {"loss:sum": float("nan"), "tokens:sum": 4.0, "sampler_gap:mean": float("inf"), "advantage:mean": 0.5}
    output = ForwardBackwardOutput(loss_fn_outputs=[], metrics=metrics)
    step = await recorded(db, operation("forward_backward"), output)
    assert (step.loss, step.sampler_gap, step.advantage, step.loss_tokens) == (None, None, 0.5, 4)


async def test_a_run_has_the_tokens_that_shared_beginnings_saved(db: Database) -> None:
    futures = FutureStore(db, recent_bytes=1000)
    await futures.start()
    for seq_id, metrics in enumerate(({"shared_tokens:sum": 700.0}, {}, {"shared_tokens:sum": 50.0}), start=1):
        of = operation("forward_backward", seq_id)
        output = ForwardBackwardOutput(loss_fn_outputs=[], metrics={"tokens:sum": 4.0, **metrics})
        step = await recorded(db, of, output)
        accepted = await futures.queue.enqueue(of)
        futures.queue.complete(accepted.request_id, Result(b"{}", "application/json", step=step))
    await futures.stop()
    (point,) = await StepStore(db).points("m", 0, 0, 1)
    assert point.shared_tokens == 750.0


@pytest.mark.parametrize(
    ("loss_fn", "as_json", "cause"),
    [
        ("importance_sampling", False, "the samples of each group had the same reward"),
        ("importance_sampling", True, "the samples of each group had the same reward"),
        ("cross_entropy", False, "advantages or weights"),
    ],
)
async def test_a_first_batch_without_any_advantage_names_the_constant_reward(
    db: Database, loss_fn: str, as_json: bool, cause: str
) -> None:
    names = ("weights",) if loss_fn == "cross_entropy" else ("logprobs", "advantages")
    inputs = {"target_tokens": np.array([2, 3]), **{name: np.zeros(2, np.float32) for name in names}}
    encoded = batch([Datum(model_input=prompt(words(2, 0)), loss_fn_inputs=inputs)], loss_fn)
    if as_json:
        request = wire.decode_forward_backward(encoded.body)
        encoded = EncodedBatch(json_of(request), wire.JSON)
    work = replace(operation("forward_backward"), body=encoded.body, content_type=encoded.content_type)
    output = ForwardBackwardOutput(
        loss_fn_outputs=[{"logprobs": np.zeros(2, np.float32)}], metrics={"loss:sum": 0.0, "tokens:sum": 0.0}
    )
    step = await recorded(db, work, output)
    (said,) = hints([step])
    assert cause in said


def json_of(request: ForwardBackwardRequest) -> bytes:
    """Return the request as a client without protobuf sends it."""
    (datum,) = request.forward_backward_input.data
    tensors = {
        name: {"data": values.tolist(), "dtype": str(values.dtype), "shape": list(values.shape)}
        for name, values in datum.loss_fn_inputs.items()
    }
    chunks = [{"type": "encoded_text", "tokens": [2, 3]}]
    batch = {"data": [{"model_input": {"chunks": chunks}, "loss_fn_inputs": tensors}]}
    loss = {"loss_fn": request.forward_backward_input.loss_fn}
    return json.dumps({"model_id": request.model_id, "seq_id": 1, "forward_backward_input": batch | loss}).encode()


async def test_a_runs_operations_come_with_their_times_and_errors(db: Database) -> None:
    futures = FutureStore(db, recent_bytes=1000)
    await futures.start()
    step = Step(model_id="m", seq_id=1, step=0, at=1.0, waited_s=2.0, run_s=3.0)
    results = [
        Result(b"{}", "application/json", step=step),
        Result(b'{"error": "too large", "category": "user"}', "application/json", True, "user"),
    ]
    for seq_id, result in enumerate(results, start=1):
        accepted = await futures.queue.enqueue(operation("forward_backward", seq_id))
        futures.queue.complete(accepted.request_id, result)
    await futures.queue.enqueue(operation("optim_step", 3))
    await futures.stop()
    queued, failed, done = await Catalog(db).operations_of_run("m", 10)
    assert (queued.seq_id, queued.state({3}), queued.state({1}), queued.run_s) == (3, "running", "queued", None)
    assert (failed.seq_id, failed.state({3}), failed.error) == (2, "failed", "too large")
    assert failed.run_s is not None and failed.waited_s is None
    assert (done.seq_id, done.state({3}), done.error, done.waited_s, done.run_s) == (1, "done", "", 2.0, 3.0)


def test_a_character_of_several_tokens_belongs_to_its_last_one() -> None:
    texts = TokenTexts(DIRECTORIES[TINY_VL])
    tokenizer = texts._tokenizer
    assert tokenizer is not None
    text = "A ketch ⛵ sails, 水の上."
    found = texts.of(tokenizer.encode(text).ids)
    assert "".join(found) == text
    assert "" in found
    assert texts.of([]) == []


def test_a_model_without_a_fast_tokenizer_gives_ids(tmp_path: Path) -> None:
    assert TokenTexts(tmp_path).of([3, 7]) == ["<3>", "<7>"]


def test_without_a_gpu_none_is_reported() -> None:
    assert read_gpus([]) == []
    if not Path("/proc/driver/nvidia").exists():
        assert read_gpus([0]) == []
