"""One copy of the base: a holder, a trainer and a real engine that map it, and their deaths.

pytest -m slow tests/contract/test_one_copy.py
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from tests.engines import fork_sampler
from tests.factories import cross_entropy, datum, image, present, prompt, words
from tests.sampling import Reference, assert_close, request, sample, sampler_config, scoring
from tests.trainers import LORA
from tinker_server.backends.base_weights.client import BaseWeights
from tinker_server.backends.base_weights.mapped import map_views
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.processes.launcher import launch_trainer
from tinker_server.backends.processes.supervisor import Supervisor
from tinker_server.backends.protocol import ignore_loading
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.embedded import DIRECTORIES, TINY_VL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
SOURCE = DIRECTORIES[TINY_VL]
INPUT = prompt(words(20, 5), image(96, 64, 1), words(15, 6))
SIGNALS_S = 120


@dataclass
class Parts:
    """Everything of one model that maps its base, and what holds that."""

    base: BaseWeights
    trainer: TrainerClient
    sampler: SamplerPool

    @property
    def supervisors(self) -> list[Supervisor]:
        return [self.base._supervisor, self.trainer._supervisor, self.sampler.engines[0].supervisor]

    def pids(self) -> list[int | None]:
        """Numbers of the living holder, trainer and engine."""
        return [one.children[0].process.pid if one.is_alive else None for one in self.supervisors]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_parts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    scratch = tmp_path_factory.mktemp("scratch")
    base = BaseWeights(replace(sampler_config(SOURCE, scratch), base_copies=1, max_context_length=1024))
    trainer = TrainerClient(base.spec, base.wrap_start(launch_trainer))
    running = Parts(base, trainer, SamplerPool(base.spec, base.wrap_start(fork_sampler, they_wait=True)))
    await asyncio.gather(base.start(ignore_loading), trainer.start(), running.sampler.start())
    yield running
    await asyncio.gather(trainer.stop(), running.sampler.stop())
    await base.stop()
    assert not present(base.spec.base_dir).exists()


@pytest_asyncio.fixture(loop_scope="module")
async def parts(running_parts: Parts) -> Parts:
    """All alive: a test that failed may have left some dead."""
    for supervisor in running_parts.supervisors:
        await supervisor.running()
    return running_parts


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(SOURCE, Renderer(str(SOURCE), image_cache_bytes=1 << 26, max_image_pixels=10**7), {"small": 4})


def num_restarts(supervisor: Supervisor) -> int:
    return supervisor.processes()[0].restarts


async def scores(parts: Parts) -> np.ndarray:
    found = (await sample(parts.sampler, scoring(INPUT), None)).prompt_logprobs
    assert found is not None
    return found


async def loss_of(parts: Parts, model_id: str, reference: Reference) -> np.ndarray:
    """The trainer's log probabilities of `INPUT`."""
    model = await parts.trainer.create_model(model_id, LORA, "owner")
    try:
        batch = cross_entropy([datum(INPUT, reference._renderer)])
        output = await parts.trainer.forward_backward(model, batch, backward=False)
    finally:
        await parts.trainer.delete_model(model)
    return output.loss_fn_outputs[0]["logprobs"]


async def test_the_directory_of_the_sockets_is_the_users_alone(parts: Parts) -> None:
    directory = parts.base.spec.base_dir
    assert present(directory).stat().st_mode & 0o777 == 0o700
    assert parts.base.spec.base_socket(None).stat().st_mode & 0o777 == 0o600


async def test_engine_and_trainer_have_no_pages_of_the_base_but_the_holders(parts: Parts) -> None:
    inodes = []
    for pid in parts.pids()[:2] + _descendants(parts.pids()[2]):
        lines = [one.split() for one in _maps(pid) if "base-weights" in one]
        inodes.append({(one[4], one[1]) for one in lines})
    holder, trainer, *engine = inodes
    (inode,) = {number for number, _ in holder}
    assert trainer == {(inode, "r--s")}
    assert {(inode, "r--s")} in engine


def _maps(pid: int | None) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def _descendants(pid: int | None) -> list[int]:
    process = psutil.Process(pid)
    return [process.pid, *(one.pid for one in process.children(recursive=True))]


async def test_the_engine_computes_what_transformers_does(parts: Parts, reference: Reference) -> None:
    assert_close(await scores(parts), reference.prompt_logprobs(INPUT))


async def test_adapters_are_served_beside_the_mapped_base(parts: Parts, reference: Reference, tmp_path: Path) -> None:
    saved = reference.save("small", 4, tmp_path / "small")
    answer = await sample(parts.sampler, scoring(INPUT), saved)
    assert_close(answer.prompt_logprobs, reference.prompt_logprobs(INPUT, "small"))


async def test_an_engine_or_a_trainer_that_dies_maps_the_same_copy_again(parts: Parts, reference: Reference) -> None:
    before = await scores(parts)
    holder, trainer, engine = parts.pids()
    os.kill(present(engine), signal.SIGKILL)
    assert np.array_equal(await scores(parts), before, equal_nan=True)
    restarts = num_restarts(parts.trainer._supervisor)
    os.kill(present(trainer), signal.SIGKILL)
    await parts.trainer.wait_for_restart(restarts)
    await loss_of(parts, "again", reference)
    after = parts.pids()
    assert after[0] == holder and after[1] != trainer and after[2] != engine


async def test_a_dead_holder_leaves_mapped_weights_right_and_all_start_again(
    parts: Parts, reference: Reference
) -> None:
    before = await scores(parts)
    mapped = map_views(parts.base.spec.base_socket(None), torch.device("cpu"))
    contents = {name: tensor.clone() for name, tensor in mapped.items()}
    long = request(prompt(words(5)), {"max_tokens": 400, "stop": [], "seed": 3})
    wanted = (await sample(parts.sampler, long, None)).sequences[0].tokens
    restarts = num_restarts(parts.base._supervisor)
    async with asyncio.TaskGroup() as group:
        in_flight = group.create_task(sample(parts.sampler, long, None))
        await asyncio.sleep(0.2)
        pids = parts.pids()
        os.kill(present(pids[0]), signal.SIGKILL)
        async with asyncio.timeout(SIGNALS_S):
            await parts.base._supervisor.wait_for_restart(restarts)
        assert all(tensor.equal(contents[name]) for name, tensor in mapped.items())
        # Those that had mapped the first copy were ended before the second was made.
        assert not set(pids) & set(parts.pids())
    assert np.array_equal(in_flight.result().sequences[0].tokens, wanted)
    assert np.array_equal(await scores(parts), before, equal_nan=True)
    await loss_of(parts, "anew", reference)
    assert all(pid is not None for pid in parts.pids())
