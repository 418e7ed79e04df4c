"""A model on the real server in training, and what it has learnt."""

from collections.abc import Mapping

import pytest
import tinker
from tinker import types
from torch import Tensor

from tests.servers import MODEL, Server
from tests.training import batch, saved_adapter, step
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.inputs.rendering import Renderer

LORA = Trainable(rank=8, seed=1)
"""What the tests create: seed and rank; all else is the server's default."""
LARGE = 1e3
PLAIN = types.AdamParams(learning_rate=LARGE, beta1=0, beta2=0, eps=LARGE)
"""A step that is nearly the gradient g itself: each weight loses g / (1 + |g| / LARGE)."""


class Trained:
    """A model on the real server, a step away from its start so that no half of its adapter is zero."""

    def __init__(self, server: Server, service: tinker.ServiceClient, renderer: Renderer, seed: int = 1) -> None:
        self._server = server
        self.client = service.create_lora_training_client(MODEL, rank=LORA.rank, seed=seed).result()
        step(self.client, batch(renderer, 77), types.AdamParams(learning_rate=2e-2))
        self._num_saved = 0

    def adapter(self) -> dict[str, Tensor]:
        """Its weights, from the server's disk."""
        self._num_saved += 1
        return saved_adapter(self._server, self.client.save_state(f"state-{self._num_saved}").result().path)

    def gradient(self, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The server's accumulated gradient, computed from the step that it takes with it."""
        self.client.optim_step(PLAIN).result()
        return self.stepped(before)

    def stepped(self, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradient with which the server has taken one `PLAIN` step."""
        steps = {name: before[name].double() - tensor.double() for name, tensor in self.adapter().items()}
        return {name: (moved / (1 - moved.abs() / LARGE)).float() for name, moved in steps.items()}


def assert_gradients(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float = 1e-3) -> None:
    """Each tensor equal to a fraction of its own largest entry, and none of them nothing."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        largest = tensor.abs().max().item()
        assert largest > 0, f"{name}: a gradient of zero proves nothing"
        assert (got[name] - tensor).abs().max().item() == pytest.approx(0, abs=rtol * largest + 1e-5), name
