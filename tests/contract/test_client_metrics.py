"""The helper for a loop's own metrics, with the real SDK, on a server of fakes.

pytest tests/contract/test_client_metrics.py
"""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker

from tests.fake_server import Running
from tests.servers import KEY
from tinker_server.client_metrics import Metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("metrics"))
    yield running
    running.stop()


@pytest.fixture
def training(server: Running) -> tinker.TrainingClient:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    return service.create_lora_training_client("tiny", rank=8).result()


def stored(server: Running, run_id: str, *names: str) -> dict[str, list[list[float]]]:
    """The steps and values of each metric, from the route of the run's page."""
    asked = {"shown": names}
    found = httpx.get(f"{server.url}/runs/{run_id}/metrics.json", params=asked).json()["metrics"]
    return {name: [list(pair) for pair in zip(of["step"], of["value"], strict=True)] for name, of in found.items()}


def test_five_lines_put_a_loops_own_metrics_on_the_page_of_its_run(
    server: Running, training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with Metrics(training) as metrics:
        for step in range(3):
            metrics.log(step=step, reward=step / 4)
        metrics.log({"test/accuracy": 0.5}, reward=1)
        metrics.log({"test/accuracy": 0.75}, step=9)
    assert stored(server, training.model_id, "test/accuracy") == {
        "reward": [[0, 0.0], [1, 0.25], [2, 0.5], [3, 1.0]],
        "test/accuracy": [[3, 0.5], [9, 0.75]],
    }


def test_what_cannot_be_stored_is_refused_by_name(server: Running, training: tinker.TrainingClient) -> None:
    metrics = Metrics(training.model_id, server.url, KEY)
    with pytest.raises(ValueError, match="reward: nan is not a finite number"):
        metrics.log(reward=float("nan"))
    with pytest.raises(ValueError, match=r"refused with status 422: .*step"):
        metrics.log(step=-1, reward=1)
    with pytest.raises(ValueError, match="refused with status 404"):
        Metrics("unknown", server.url, KEY).log(reward=1)
    with pytest.raises(ValueError, match="base_url: give it, or set TINKER_BASE_URL"):
        Metrics(training, api_key=KEY)
    assert stored(server, training.model_id) == {}


def test_metrics_wait_for_a_server_that_is_away(
    server: Running, training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_server.client_metrics._PAUSE_S", 0.05)
    away = Metrics(training, "http://127.0.0.1:9", KEY, patience_s=0.3)
    with pytest.raises(TimeoutError, match=r"not taken within 0.3 s: ConnectError"):
        away.log(reward=1)
    back = threading.Timer(0.2, setattr, (away, "_http", httpx.Client(base_url=server.url, headers={"X-API-Key": KEY})))
    back.start()
    away.log(step=5, reward=2)
    assert stored(server, training.model_id) == {"reward": [[5, 2.0]]}


def test_the_helper_imports_nothing_of_the_server() -> None:
    code = """
import sys, tinker_server.client_metrics
rooms = ("tinker_server", "fastapi", "pydantic", "torch")
print(*sorted(name for name in sys.modules if name.partition(".")[0] in rooms))
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["tinker_server", "tinker_server.client_metrics"]
