"""When accepted work runs, with the real store and operations on a backend that computes nothing."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.submitting import GRACE_S, Client, server
from tinker_server.api_schemas.training import (
    LoraConfig,
    OptimizerConfig,
    OptimStepRequest,
)
from tinker_server.api_schemas.weights import SaveWeightsForSamplerRequest
from tinker_server.errors import BadRequest, SequenceConflict, ShuttingDown
from tinker_server.models.lane import MAX_LET_IN, Lane
from tinker_server.store.futures.records import Operation


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        yield client


async def test_work_runs_by_number_whatever_the_order_of_arrival(client: Client) -> None:
    ids = [await client.forward_backward(number) for number in (3, 2, 1)]
    for request_id in ids:
        assert not (await client.result(request_id)).failed
    assert client.ran() == ["loss 1", "loss 2", "loss 3"]


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_a_gap_before_forward_backward_is_waited_for_until_the_grace_is_over(client: Client) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    request_id = await client.forward_backward(2)
    await client.result(request_id)
    assert GRACE_S * 0.9 < loop.time() - started < GRACE_S + 2


async def test_another_arrival_starts_the_grace_anew(client: Client) -> None:
    last = await client.forward_backward(3)
    await asyncio.sleep(GRACE_S * 0.7)
    await client.forward_backward(2)
    await asyncio.sleep(GRACE_S * 0.7)
    await client.forward_backward(1)
    await client.result(last)
    assert client.ran() == ["loss 1", "loss 2", "loss 3"]


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_a_later_optim_step_settles_the_numbers_before_it(client: Client) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await client.forward_backward(2)
    await client.result(await client.optim_step(5))
    assert client.ran() == ["loss 2", "optim_step"] and loop.time() - started < GRACE_S


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_a_refused_number_is_not_waited_for(client: Client) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    client.services.scheduler.refuse_number(client.model_id, 1, "forward_backward")
    request_id = await client.forward_backward(3)
    client.services.scheduler.refuse_number(client.model_id, 2, "forward_backward")
    await client.result(request_id)
    assert loop.time() - started < GRACE_S


async def test_a_part_that_comes_after_it_was_skipped_runs_at_once_until_its_step_is_taken(client: Client) -> None:
    await client.result(await client.forward_backward(3))
    assert not (await client.result(await client.forward_backward(2))).failed
    await client.result(await client.optim_step(4))
    with pytest.raises(BadRequest, match=r"forward_backward 1 of .* comes too late"):
        await client.forward_backward(1)
    assert client.ran() == ["loss 3", "loss 2", "optim_step"]


async def test_a_repeated_submit_runs_once(client: Client) -> None:
    first, second = await asyncio.gather(client.optim_step(1), client.optim_step(1))
    assert first == second and json.loads((await client.result(first)).body)["metrics"]["step"] == 1
    assert await client.optim_step(1) == first
    await client.result(await client.optim_step(2))
    assert client.ran() == ["optim_step"] * 2


async def test_another_operation_under_a_used_number_is_refused(client: Client) -> None:
    await client.optim_step(1)
    with pytest.raises(SequenceConflict, match="was optim_step before, and is forward_backward now"):
        await client.forward_backward(1)


async def test_a_failed_operation_does_not_stop_the_lane(client: Client) -> None:
    invalid = await client.forward_backward(1, "wrong")
    broken = await client.forward_backward(2, "broken")
    incomplete, step = await client.optim_step(3), await client.optim_step(4)
    assert await client.error(invalid) == {"error": "datum 0: loss_fn 'wrong' is not known", "category": "user"}
    text = "the operation failed unexpectedly (ZeroDivisionError); the server's log has the details"
    assert await client.error(broken) == {"error": text, "category": "server"}
    assert await client.error(incomplete) == {
        "error": "the gradient is incomplete (forward_backward 2 failed)",
        "category": "user",
    }
    assert not (await client.result(step)).failed


async def test_a_trainer_is_granted_to_its_models_in_turn(client: Client) -> None:
    await client.result(await client.create_model(1))
    other = f"{client.session_id}:train:1"
    client.trainer.gates["hold"].clear()
    await client.forward_backward(1, "hold")
    ids = [await client.forward_backward(2, "a2"), await client.forward_backward(1, "b1", other)]
    await asyncio.sleep(0.05)
    client.trainer.gates["hold"].set()
    for request_id in ids:
        assert not (await client.result(request_id)).failed
    assert [name for name, _ in client.trainer.calls[2:]] == ["hold", "b1", "a2"]


async def test_samples_do_not_wait_for_each_other_or_for_training(client: Client) -> None:
    client.trainer.gates["hold"].clear()
    await client.forward_backward(1, "hold")
    for result in await asyncio.gather(*[client.result(await client.sample(seq_id)) for seq_id in (5, 0)]):
        assert result.content_type == "application/x-protobuf" and not result.failed
    client.trainer.gates["hold"].set()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"base_model": "other"}, "base model 'other' is not served here; served: tiny"),
        ({"lora_config": None}, "send one; models here are LoRA adapters"),
        ({"lora_config": LoraConfig(rank=128)}, "rank 128: at most 64"),
        (
            {"lora_config": LoraConfig(rank=8, train_mlp=False, train_attn=False, train_unembed=False)},
            "trains nothing",
        ),
        ({"optimizer_config": OptimizerConfig(type="dimuon")}, "only type 'adamw' is"),
    ],
)
async def test_what_cannot_be_created_fails_in_its_future(client: Client, fields: dict[str, object], text: str) -> None:
    error = await client.error(await client.create_model(7, **fields))
    assert text in error["error"] and error["category"] == "user"


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("a/b", {}, "checkpoint name 'a/b'"),
        ("ok", {"ttl_seconds": 10}, "ttl_seconds 10 is not between 3600 and 315360000"),
        ("taken", {}, "exists already"),
    ],
)
async def test_what_cannot_be_saved_fails_in_its_future(
    client: Client, path: str, fields: dict[str, object], text: str
) -> None:
    await client.result(await client.save(1, "taken"))
    error = await client.error(await client.save(2, path, **fields))
    assert text in error["error"] and error["category"] == "user"


def directories(data_dir: Path, name: str) -> list[Path]:
    return list(data_dir.glob(f"checkpoints/*/weights/{name}~*"))


async def test_overwriting_takes_a_new_directory_and_deletes_the_old_one(client: Client, tmp_path: Path) -> None:
    await client.result(await client.save(1, "a"))
    (old,) = directories(tmp_path, "a")
    await client.result(await client.optim_step(2))
    assert not (await client.result(await client.save(3, "a", overwrite=True))).failed
    (new,) = directories(tmp_path, "a")
    assert old != new and (new / "steps").read_text() == "1"


async def test_a_model_is_created_from_a_checkpoint(client: Client) -> None:
    await client.result(await client.optim_step(1))
    saved = json.loads((await client.result(await client.save(2, "a"))).body)["path"]
    await client.result(await client.load_as(1, saved, optimizer=True))
    await client.result(await client.load_as(2, saved, optimizer=False))
    assert client.trainer.steps == {f"{client.session_id}:train:{n}": steps for n, steps in enumerate([1, 1, 0])}
    run = await client.services.runs.get(f"{client.session_id}:train:1")
    first = await client.services.runs.get(client.model_id)
    assert (run.trainable.rank, run.trainable.seed) == (8, first.trainable.seed)


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("nonsense", {}, "is not tinker://"),
        ("tinker://run/sampler_weights/a", {}, "cannot be trained on"),
        ("tinker://run/weights/a", {}, "training run run has no weights named 'a'"),
        (None, {"base_model": "other"}, "is of tiny, not of other"),
    ],
)
async def test_what_cannot_be_loaded_fails_in_its_future(
    client: Client, path: str | None, fields: dict[str, object], text: str
) -> None:
    saved = json.loads((await client.result(await client.save(1, "a"))).body)["path"]
    error = await client.error(await client.load_as(1, path or saved, **fields))
    assert text in error["error"] and error["category"] == "user"


async def test_inflight_weights_have_no_name(client: Client) -> None:
    request = SaveWeightsForSamplerRequest(model_id=client.model_id, seq_id=1, path="a", kind="inflight")
    error = await client.error(await client.submit("save_weights_for_sampler", request, 1))
    assert "weights with a name are of kind 'snapshot'" in error["error"] and error["category"] == "user"


async def test_a_model_that_its_trainer_lost_is_restored_with_all_that_was_done_to_it(client: Client) -> None:
    await client.result(await client.optim_step(1))
    await client.result(await client.forward_backward(2))
    client.trainer.lose(client.model_id)
    result = await client.result(await client.optim_step(3))
    assert json.loads(result.body)["metrics"]["step"] == 2
    assert client.trainer.applied[-1] == (client.model_id, [1])


async def test_after_a_restart_everything_that_was_accepted_is_done(tmp_path: Path, database_url: str) -> None:
    async with server(tmp_path, database_url) as before:
        await before.result(await before.create_model())
        before.trainer.gates["hold"].clear()
        before.sampler.gate.clear()
        running = await before.forward_backward(1, "hold")
        queued = await before.optim_step(2)
        sample = await before.sample()
        await before.services.drain()
        with pytest.raises(ShuttingDown):
            await before.optim_step(3)
    async with server(tmp_path, database_url) as after:
        assert not (await after.result(sample)).failed
        for request_id in (running, queued):
            assert not (await after.result(request_id)).failed
        request = OptimStepRequest(model_id=before.model_id, seq_id=3)
        result = await after.result(await after.submit("optim_step", request, 3, before.model_id))
        assert json.loads(result.body)["metrics"]["step"] == 2
        assert [gradient for _, gradient in after.trainer.applied] == [[1], []]


async def test_polls_that_come_while_the_server_stops_are_held_and_not_asked_again_at_once(client: Client) -> None:
    client.trainer.gates["hold"].clear()
    running = await client.forward_backward(1, "hold")
    held = asyncio.create_task(client.services.futures.wait(running, client.owner, 30))
    await asyncio.sleep(0.02)
    await client.services.drain()
    assert await asyncio.wait_for(held, 1) is None  # its client asks again
    began, num_polls = time.monotonic(), 0
    while time.monotonic() - began < 1.5:
        assert await client.services.futures.wait(running, client.owner, 30) is None
        num_polls += 1
    assert num_polls <= 2
    client.trainer.gates["hold"].set()


async def test_work_that_is_running_may_end_when_the_server_stops(tmp_path: Path, database_url: str) -> None:
    async with server(tmp_path, database_url) as before:
        await before.result(await before.create_model())
        before.trainer.gates["hold"].clear()
        running = await before.forward_backward(1, "hold")
        await asyncio.sleep(0.02)
        asyncio.get_running_loop().call_later(0.03, before.trainer.gates["hold"].set)
    async with server(tmp_path, database_url) as after:
        assert not (await after.result(running)).failed


async def test_results_hold_no_number_that_strict_json_lacks(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    client.trainer.steps[client.model_id] = float("nan")  # type: ignore[assignment]
    error = await client.error(await client.optim_step(1))
    assert "not JSON compliant" in caplog.text and error["category"] == "server"


def test_the_first_missing_number_is_let_in_beyond_all_bounds_and_few_others_are() -> None:
    """Numbers that come in descending order would pass the bounds otherwise, each as what the others wait for."""
    lane = Lane(expected=1)

    def waits(number: int) -> None:
        lane.add(Operation("forward_backward", "model", number, b"", "application/json", "alice", "one", 0), 0)

    assert not lane.lets_in(100), "nothing waits for it"
    waits(100)
    assert not lane.lets_in(101)
    lane.refuse(1, "forward")
    for number in range(99, 99 - MAX_LET_IN, -1):
        assert lane.lets_in(number)
        waits(number)
    assert not lane.lets_in(99 - MAX_LET_IN) and not lane.lets_in(3)
    assert lane.lets_in(2), "1 was refused, so that this is the first"
    waits(2)
    lane.take()
    assert lane.lets_in(3)
    waits(3)
    lane.take_all()
    assert not lane.let_in


def test_thousands_of_operations_that_wait_are_taken_in_a_time_that_grows_with_their_number() -> None:
    lane, count = Lane(expected=1), 20_000
    started = time.process_time()
    for number in range(count, 0, -1):
        lane.lets_in(number)
        lane.add(Operation("optim_step", "model", number, b"", "application/json", "alice", "one", 0), 0)
    for number in range(2 * count, 2 * count + 5000):
        lane.refuse(number, "forward_backward")
    for number in range(1, count + 1):
        assert lane.wait_s(0, 0) <= 0
        assert lane.take().seq_id == number
    assert time.process_time() - started < 2
