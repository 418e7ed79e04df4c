"""A server with other machines, as its operator sees it."""

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tinker.types as types

from tests.cluster.machines import Machine, free_port, rays, until
from tests.factories import image, prompt, words
from tests.servers import KEY, MODEL, Server, runs, sdk_input
from tests.training import batch, logprobs_of, step
from tinker_server.backends.inputs.rendering import Renderer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HOLDER = "tinker_server.backends.sampler.engine.weight_holder"
ENGINE, RANK = f"sampler {MODEL} engine 1 on a", f"trainer {MODEL} rank 1 on a"


def commands() -> list[str]:
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def gauges(server: Server, name: str, label: str) -> dict[str, float]:
    """The values of a metric by one of its labels."""
    text = httpx.get(f"{server.base_url}/metrics", headers={"x-api-key": KEY}).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {line.partition(f'{label}="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def trained(server: Server, renderer: Renderer) -> tuple[Any, Any]:
    """A client that has trained for a step, and one that samples from what was learned."""
    training = server.client().create_lora_training_client(base_model=MODEL, rank=8).result()
    step(training, batch(renderer))
    saved = training.save_weights_for_sampler("first").result()
    return training, server.client().create_sampling_client(model_path=saved.path).result()


def drawn(sampling: Any) -> list[list[int]]:
    """Answers to different prompts, all asked for at once."""
    params = types.SamplingParams(max_tokens=30, seed=7)
    prompts = [sdk_input(prompt(words(9, seed), image(64, 64, seed))) for seed in range(16)]
    asked = [sampling.sample(one, num_samples=1, sampling_params=params) for one in prompts]
    return [one.result().sequences[0].tokens for one in asked]


async def test_a_machine_samples_and_trains_for_a_server_and_comes_back_to_it_after_a_crash(
    tiny_vl: Path, renderer: Renderer, temporary: str, tmp_path: Path
) -> None:
    port, data = free_port(), tmp_path / "data"
    arguments = ["--cluster", "--cluster-address", "127.0.0.1", "--cluster-port", str(port)]
    server = await asyncio.to_thread(Server(data, {MODEL: tiny_vl}, *arguments).start)
    token_file = data / "cluster-token"
    token = token_file.read_text()
    assert len(token) == 64 and f"tinker-server join 127.0.0.1:{port} --token-file FILE" in server.log.read_text()
    training, sampling = await asyncio.to_thread(trained, server, renderer)
    alone = await asyncio.to_thread(drawn, sampling)

    machine = await Machine(f"127.0.0.1:{port}", token_file, "a", tiny_vl).start()
    async with AsyncExitStack() as leaving:
        leaving.push_async_callback(machine.stop)
        await until(lambda: gauges(server, "tinker_node_up", "node") == {"a": 1})
        command = [sys.executable, "-m", "tinker_server", "status", "--url", server.base_url]
        status = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert re.search(r"machine a at 127\.0\.0\.1 .* alive", status.stdout)
        assert not [command for command in commands() if token in command]
        received = data / "machine-a/received"

        async def draw_until_both_have() -> None:
            async with asyncio.timeout(250):
                while "1" not in gauges(server, "tinker_pool_sequences", "engine"):  # noqa: ASYNC110 - it loads
                    await asyncio.sleep(2)
                while not any(received.glob("*/adapter_model.safetensors")):
                    assert await asyncio.to_thread(drawn, sampling) == alone

        await draw_until_both_have()
        assert gauges(server, "tinker_process_up", "process")[ENGINE] == 1
        await until(lambda: gauges(server, "tinker_process_up", "process").get(RANK) == 1, 200)
        await asyncio.to_thread(step, training, batch(renderer, 1))
        saved = await asyncio.to_thread(lambda: training.save_weights_for_sampler("second").result())
        assert saved.path.endswith("second")

        server.kill()
        await until(lambda: not rays())
        await asyncio.to_thread(server.start)
        shutil.rmtree(received, ignore_errors=True)
        await draw_until_both_have()
        code, said = await machine.stop()
        assert code == 130 and token not in said + server.log.read_text()
        assert gauges(server, "tinker_node_up", "node") == {}
        assert await asyncio.to_thread(server.stop) == 0


def holders(server: Server) -> dict[bool, list[psutil.Process]]:
    """What holds a base, by whether it is the server's own."""
    found: dict[bool, list[psutil.Process]] = {True: [], False: []}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if runs(process, HOLDER):  # a guard's command has it, too
                found[server.process.pid in (parent.pid for parent in process.parents())].append(process)
    return found


def base_directories(temporary: str) -> list[Path]:
    return list(Path(temporary).glob("tinker-base-*"))


@pytest.mark.parametrize("precision", [[], ["--base-precision", "fp8"]], ids=["as in files", "fp8"])
async def test_a_machines_engine_and_rank_share_a_copy_of_the_base_and_survive_what_holds_it(
    precision: list[str], tiny_vl: Path, renderer: Renderer, temporary: str, tmp_path: Path
) -> None:
    port, data = free_port(), tmp_path / "data"
    arguments = ["--cluster", "--cluster-address", "127.0.0.1", "--cluster-port", str(port), "--base-copies", "1"]
    arguments += precision
    server = await asyncio.to_thread(Server(data, {MODEL: tiny_vl}, *arguments).start)
    training, sampling = await asyncio.to_thread(trained, server, renderer)
    alone = await asyncio.to_thread(drawn, sampling)
    data_of_all = [item for seed in (1, 2) for item in batch(renderer, seed)]
    scored = await asyncio.to_thread(logprobs_of, training, data_of_all)
    machine = await Machine(f"127.0.0.1:{port}", data / "cluster-token", "a", tiny_vl).start()

    def restarts() -> list[float]:
        found = gauges(server, "tinker_process_restarts_total", "process")
        return [found.get(process, 0) for process in (ENGINE, RANK)]

    async def until_both_are_right() -> None:
        up = partial(gauges, server, "tinker_process_up", "process")
        await until(lambda: up().get(ENGINE) == 1 and up().get(RANK) == 1)
        assert await asyncio.to_thread(drawn, sampling) == alone
        for got, wanted in zip(await asyncio.to_thread(logprobs_of, training, data_of_all), scored, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-4)

    async with AsyncExitStack() as leaving:
        leaving.push_async_callback(machine.stop)
        await until_both_are_right()
        before, [held] = restarts(), holders(server)[False]
        held.kill()
        await until(lambda: all(now > then for now, then in zip(restarts(), before, strict=True)))
        await until_both_are_right()
        assert [one.pid for one in holders(server)[False]] != [held.pid]
        code, said = await machine.stop()
        assert code == 130, said
        await until(lambda: not holders(server)[False])
        assert await asyncio.to_thread(server.stop) == 0
    assert not base_directories(temporary)
    assert "is not recorded" not in server.log.read_text()
