"""The embedded model in bfloat16 on a GPU: trainer and sampler see the same photographs.

pytest tests/gpu/test_photographs.py
"""

from collections.abc import Iterator

import pytest
import tinker.types as types
import torch

from tests.factories import make_renderer
from tests.gpu.agreement import LARGEST, MEAN, differences, share_kernels
from tests.photographs import SEEING, conversation, our_input, photographs
from tests.servers import Server
from tests.squares import check_that_a_red_square_is_called_red
from tinker_server.embedded import TINY_VL

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    data_dir = tmp_path_factory.mktemp("seeing") / "data"
    share_kernels(data_dir / "scratch")
    running = Server(data_dir, {TINY_VL: SEEING}, "--device", "cuda").start()
    yield running
    assert running.stop() == 0, running.log.read_text()[-4000:]


def test_photographs_are_scored_alike_before_and_after_training(seeing):
    service, asked, renderer = seeing.client(), conversation(), make_renderer(SEEING)
    client = service.create_lora_training_client(TINY_VL, rank=32, seed=1).result()
    batch = [asked.datum(photo) for photo in photographs("train", 30)]
    # The whole conversation, with its answer.
    inputs = [our_input(asked.datum(photo).model_input) for photo in photographs("test", 40)]
    found = {"base": differences(client, service.create_sampling_client(base_model=TINY_VL).result(), inputs, renderer)}
    for _ in range(10):
        client.forward_backward(batch, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    found["adapter"] = differences(client, sampler, inputs, renderer)
    for name, errors in found.items():
        print(f"{name}: mean {errors.mean():.4f}, max {errors.max():.4f} nats over {len(errors)} tokens")
        assert errors.mean() < MEAN
        assert errors.max() < LARGEST


def test_a_red_square_is_called_red(seeing):
    check_that_a_red_square_is_called_red(seeing.client(), TINY_VL)
