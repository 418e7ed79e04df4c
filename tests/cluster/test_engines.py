"""Engines on another machine: they sample as those here, from weights that were sent to them, and lose nothing."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from tests.cluster.machines import GPUS, Machine, is_alive, joined, kill, started, until
from tests.engines import fork_sampler
from tests.factories import present, prompt, words
from tests.models import make_tiny_vl
from tests.sampling import ADJACENT, ATOL, RANKS, Reference, request, sample, sampler_config, scoring
from tests.servers import MODEL, variables_of
from tinker_server.backends.cluster.bases import RemoteBases
from tinker_server.backends.cluster.client import Cluster
from tinker_server.backends.cluster.engines import RemoteEngines
from tinker_server.backends.cluster.lines import LOG
from tinker_server.backends.formats.model_files import fingerprint
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.processes.rpc import Child
from tinker_server.backends.protocol import ChatTask, SamplingTask
from tinker_server.backends.sampler.client import EngineClient
from tinker_server.backends.sampler.commands import Chat, Sample
from tinker_server.backends.sampler.pool import SamplerPool

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Running:
    cluster: Cluster
    pool: SamplerPool
    directory: Path
    machine: Machine | None = None

    @property
    def remote(self) -> EngineClient:
        [engine] = self.pool.engines[1:]
        return engine

    def received(self) -> list[Path]:
        """The weights that the machine has, the latest last."""
        return sorted((self.directory / "machine-a/received").glob("[!.]*"), key=lambda held: held.stat().st_mtime_ns)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    directory = tmp_path_factory.mktemp("cluster")
    spec = replace(sampler_config(tiny_vl, directory / "scratch"), name=MODEL, files_fingerprint=fingerprint(tiny_vl))
    pool = SamplerPool(spec, fork_sampler, may_grow=True)
    await pool.start()
    try:
        bases = RemoteBases({MODEL: spec})
        engines = RemoteEngines({MODEL: (spec, pool)}, bases)
        async with started(directory, bases, engines, models={MODEL: str(tiny_vl)}) as cluster:
            yield Running(cluster, pool, directory)
    finally:
        await pool.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(running: Running) -> AsyncIterator[AsyncExitStack]:
    """Those that tests have made join, until all have run."""
    async with AsyncExitStack() as joining:
        yield joining


@pytest_asyncio.fixture(loop_scope="module")
async def there(running: Running, machines: AsyncExitStack) -> Running:
    """With an engine of another machine that is ready, and has fetched the model; also after a test that has killed
    it."""
    if running.machine is not None and running.machine.process.returncode is not None:
        await until(lambda: not is_alive(running.cluster, "a") and len(running.pool.engines) == 1)
        running.machine = None
    if running.machine is None:
        running.machine = await machines.enter_async_context(joined(running.cluster, "a", None))
    await until(lambda: running.remote.supervisor.is_alive)
    return running


@pytest.fixture(scope="module")
def reference(tiny_vl: Path, renderer: Renderer) -> Reference:
    return Reference(tiny_vl, renderer, {"small": RANKS["small"], "large": RANKS["large"]})


async def ask_many(pool: SamplerPool, weights: Path | None, num: int = 24) -> list[int]:
    """Sample so many prompts, with images, at once; return the number of tokens of each."""
    asked = [
        request(prompt(words(9, seed), *ADJACENT.chunks[1:2]), {"max_tokens": 60, "seed": seed}) for seed in range(num)
    ]
    answers = await asyncio.gather(*(sample(pool, one, weights) for one in asked))
    return [len(answer.sequences[0].tokens) for answer in answers]


async def test_an_engine_on_another_machine_scores_images_with_an_adapter_that_it_was_sent(
    there: Running, reference: Reference, tmp_path: Path
) -> None:
    weights = reference.save("small", RANKS["small"], tmp_path / "small")
    task = SamplingTask.from_request(scoring(ADJACENT), weights, "somebody")
    before = there.received()
    child = await there.remote.running()
    answers = await asyncio.gather(*(there.remote.call(child, Sample(task)) for _ in range(3)))
    for answer in answers:
        np.testing.assert_allclose(
            present(answer.prompt_logprobs), reference.prompt_logprobs(ADJACENT, "small"), atol=ATOL
        )
    assert len(there.received()) == len(before) + 1  # sent once, though three asked for it
    shutil.rmtree(weights)  # of which it has its own copy
    assert (await there.remote.call(child, Sample(task))).prompt_logprobs is not None


async def test_weights_exist_once_the_other_machine_has_them_too(
    there: Running, reference: Reference, tmp_path: Path
) -> None:
    weights = reference.save("large", RANKS["large"], tmp_path / "large")
    await there.pool.publish(weights, "somebody")
    received = there.received()[-1]
    assert {path.name: path.read_bytes() for path in received.iterdir()} == {
        path.name: path.read_bytes() for path in weights.iterdir()
    }


async def test_a_chat_is_answered_on_another_machine_as_here(there: Running) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    answers = []
    for engine in there.pool.engines:
        parts: list[str] = []
        usage = await engine.call(
            await engine.running(), Chat(ChatTask("chat_completions", body, None, "somebody")), parts.append
        )
        answers.append((usage.sampled, json.loads("".join(parts))["choices"]))
    assert answers[0] == answers[1] and answers[0][0] == 8


async def test_a_process_on_another_machine_sees_nothing_of_ray(there: Running) -> None:
    [child] = there.remote.supervisor.children
    environment = variables_of(psutil.Process(child.process.pid))
    assert environment["CUDA_VISIBLE_DEVICES"] == GPUS
    assert "OMP_NUM_THREADS" not in environment and not [name for name in environment if name.startswith("RAY_")]


async def test_what_a_process_on_another_machine_writes_is_in_the_servers_log(
    there: Running, caplog: pytest.LogCaptureFixture
) -> None:
    [child] = there.remote.supervisor.children
    errors = Path(f"/proc/{child.process.pid}/fd/2")
    await asyncio.to_thread(errors.write_text, "out of memory, somewhere\n")
    await until(lambda: "a: out of memory, somewhere" in caplog.messages)
    assert "out of memory, somewhere\n" in (there.directory / "machine-a" / LOG).read_text()


async def test_a_machine_without_the_model_fetches_it_once(there: Running) -> None:
    fetched = there.directory / "machine-a/models"
    [directory] = fetched.iterdir()
    assert fingerprint(directory) == directory.name
    assert there.cluster.nodes["a"].offer.models == {MODEL: str(directory)}


async def test_an_engine_that_dies_on_another_machine_is_started_again_there(there: Running) -> None:
    [child] = there.remote.supervisor.children
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask_many(there.pool, None))
        await until(lambda: bool(there.remote.requests))
        psutil.Process(child.process.pid).kill()
    assert len(asked.result()) == 24
    await until(lambda: there.remote.supervisor.is_alive)
    [again] = there.remote.supervisor.children
    assert again.process.pid != child.process.pid and again.name == f"sampler {MODEL} engine {there.remote.number} on a"


async def test_an_agent_that_dies_is_made_again(there: Running) -> None:
    [child] = there.remote.supervisor.children
    agent = agent_of(child)
    agent.kill()
    await until(lambda: not there.remote.supervisor.is_alive)
    await until(lambda: there.remote.supervisor.is_alive)
    [again] = there.remote.supervisor.children
    assert agent_of(again).pid != agent.pid


def agent_of(child: Child) -> psutil.Process:
    """Return the process of Ray that has started it, through the process of which it is a fork."""
    return next(above for above in psutil.Process(child.process.pid).parents() if "Agent" in " ".join(above.cmdline()))


async def test_another_model_under_the_same_name_is_refused(running: Running, tmp_path: Path) -> None:
    other = make_tiny_vl(tmp_path / "other", seed=1)
    address = f"{running.cluster.address.host}:{running.cluster.address.port}"
    code, said = await (await Machine(address, running.cluster.token_file, "b", other).start()).ended()
    assert code == 2 and f"the files of model {MODEL} in {other} have the fingerprint" in said
    assert not is_alive(running.cluster, "b")


async def test_a_lost_machines_samples_run_elsewhere_and_it_is_used_again_when_it_is_back(
    there: Running, reference: Reference, tiny_vl: Path, tmp_path: Path
) -> None:
    weights = reference.save("small", RANKS["small"], tmp_path / "small")
    [child] = there.remote.supervisor.children
    process = psutil.Process(child.process.pid)
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask_many(there.pool, weights))
        await until(lambda: bool(there.pool.engines[0].requests))
        await until(lambda: bool(there.remote.requests) and bool(there.received()))
        kill(present(there.machine).process.pid)
    lengths = asked.result()
    assert len(lengths) == 24
    await until(lambda: len(there.pool.engines) == 1)
    await until(lambda: not process.is_running())  # it has ended with its machine
    async with joined(there.cluster, "a", tiny_vl):
        await until(lambda: there.remote.supervisor.is_alive)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ask_many(there.pool, weights))
            await until(lambda: bool(there.remote.requests))
        assert asked.result() == lengths
