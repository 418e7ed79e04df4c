"""The dashboard of a real server: a run with a real trainer, and a chat about a photograph with the real engine."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import BrowserContext, expect
from tinker import types

from tests.browser.pages import Watched
from tests.photographs import SEEING, photographs
from tests.servers import Server

pytestmark = pytest.mark.slow
NAME = "tinker-server/tiny-vl"
TOKENS = np.arange(10, 41)
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(TOKENS[:-1].tolist()),
    loss_fn_inputs={
        "target_tokens": types.TensorData.from_numpy(TOKENS[1:]),
        "weights": types.TensorData.from_numpy(np.ones(30, np.float32)),
    },
)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The base model that comes with the server: it knows photographs, and has a chat template."""
    running = Server(tmp_path_factory.mktemp("seeing") / "data", {NAME: SEEING}).start()
    yield running
    assert running.stop() == 0, running.log.read_text()[-4000:]


def test_a_run_is_drawn_and_its_weights_are_talked_to_about_a_photograph(
    context: BrowserContext, seeing: Server, tmp_path: Path
) -> None:
    training = seeing.client().create_lora_training_client(NAME, rank=8).result()
    for _ in range(4):
        batch = training.forward_backward([DATUM], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        batch.result()
    path = training.save_weights_for_sampler("for-chat").result().path
    watched = Watched(context, seeing.base_url)
    page = watched.open(f"/runs/{path.removeprefix('tinker://').partition('/')[0]}")
    figure = page.locator("figure[data-curve=loss]")
    expect(figure).to_have_attribute("data-points", "4")
    expect(page.locator("figure[data-curve=grad_norm]")).to_have_attribute("data-points", "4")
    expect(page.locator("#checkpoints")).to_contain_text("for-chat")
    page = watched.open("/machine")
    expect(page.get_by_role("region", name=NAME).locator(".processes li")).to_have_count(2)
    page = watched.open("/playground")
    (tmp_path / "photo.jpg").write_bytes(photographs("test", 3)[2].jpeg)
    page.get_by_label("Two models side by side").check()
    page.get_by_role("region", name="Model 2").get_by_role("combobox").select_option(path)
    page.get_by_label("Log probabilities").check()
    page.get_by_label("Message").fill("What is on this photograph?")
    page.get_by_label("Maximum tokens").fill("8")
    page.get_by_label("Image").set_input_files(tmp_path / "photo.jpg")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)
    for side in ("Conversation 1", "Conversation 2"):
        answer = page.get_by_role("log", name=side).locator(".assistant")
        expect(answer).not_to_be_empty()
        expect(answer).not_to_have_class("wrong")
        expect(answer.locator("span").first).to_have_attribute("title", re.compile(r"^-\d+\.\d{3} nats"))
    assert watched.elsewhere() == [] and watched.errors == []
