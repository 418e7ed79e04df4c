"""Expected values of the real server, by transformers, PEFT and autograd, and the server's own."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import tinker
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from tinker import types
from torch import Tensor
from transformers import AutoModelForImageTextToText

from api_schemas.inputs import Datum, ModelInput
from backends.inputs.rendering import Renderer
from tests.servers import MODEL, Server
from tests.trainers import reference_inputs
from tests.training import batch, saved_adapter, step

RANK = 8
LARGE = 1e3
PLAIN = types.AdamParams(learning_rate=LARGE, beta1=0, beta2=0, eps=LARGE)
"""A step that is nearly the gradient g itself: each weight loses g / (1 + |g| / LARGE)."""


class Reference:
    """The tiny model with one adapter, as the server makes it by default."""

    def __init__(self, source: Path, renderer: Renderer, dtype: torch.dtype = torch.float32) -> None:
        self._renderer = renderer
        config = PeftLoraConfig(
            r=RANK, lora_alpha=32, target_modules=r".*(language_model.*\.(q|k|v|o|gate|up|down)_proj|lm_head)"
        )
        self.model = get_peft_model(AutoModelForImageTextToText.from_pretrained(source), config).eval().to(dtype)
        self.adapter = {
            name.replace(".default", ""): tensor for name, tensor in self.model.named_parameters() if "lora_" in name
        }

    def take(self, adapter: Mapping[str, Tensor]) -> None:
        """Go on from these weights, without a gradient."""
        assert adapter.keys() == self.adapter.keys()
        with torch.no_grad():
            for name, tensor in self.adapter.items():
                tensor.copy_(adapter[name])
                tensor.grad = None

    def distribution_TV(self, model_input: ModelInput) -> Tensor:
        """[T, V] log probabilities; row t is of what follows token t."""
        inputs = reference_inputs(self._renderer, model_input, self.model)
        logprobs: Tensor = self.model(**inputs, use_cache=False).logits[0].log_softmax(-1)
        return logprobs

    def logprobs(self, item: Datum) -> Tensor:
        """Log probabilities of a datum's targets, in their shape."""
        targets = torch.from_numpy(item.loss_fn_inputs["target_tokens"])
        logprobs_TV = self.distribution_TV(item.model_input)
        return logprobs_TV.gather(-1, targets.reshape(len(targets), -1)).reshape(targets.shape)

    def gradient(self, loss: Tensor) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(loss, list(self.adapter.values()))
        return dict(zip(self.adapter, gradients, strict=True))


class Trained:
    """A model on the real server, a step away from its start so that no half of its adapter is zero."""

    def __init__(self, server: Server, service: tinker.ServiceClient, renderer: Renderer, seed: int = 1) -> None:
        self._server = server
        self.client = service.create_lora_training_client(MODEL, rank=RANK, seed=seed).result()
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
