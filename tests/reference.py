"""transformers, PEFT and torch.optim as the reference of training: one model, one sample after the other, unpacked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.loss_formulas import loss_of
from tests.trainers import reference_inputs
from tinker_server.api_schemas.inputs import Datum, ModelInput
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.inputs.rendering import Renderer


class Reference:
    """A tiny vision-language model with one adapter, whose tensors have their names of a PEFT file."""

    def __init__(self, source: Path, renderer: Renderer, lora: Trainable, dtype: torch.dtype = torch.float32) -> None:
        self._renderer = renderer
        config = PeftLoraConfig(r=lora.rank, lora_alpha=32, target_modules=_targets(lora))
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


class Steps:
    """A reference in training, with an optimizer of its own."""

    def __init__(self, reference: Reference, adam: AdamParams) -> None:
        self._reference = reference
        self._clip = adam.grad_clip_norm
        self._optimizer = torch.optim.AdamW(
            reference.adapter.values(),
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )

    def forward_backward(
        self, loss_fn: str, data: Sequence[Datum], config: Mapping[str, float] = MappingProxyType({})
    ) -> tuple[list[Tensor], float]:
        """Return each datum's log probabilities, and the loss; the gradient stands in the adapter's tensors."""
        logprobs = [self._reference.logprobs(item) for item in data]
        losses = [loss_of(loss_fn, one, item.loss_fn_inputs, config) for one, item in zip(logprobs, data, strict=True)]
        loss = torch.stack(losses).sum()
        loss.backward()
        return [one.detach() for one in logprobs], loss.item()

    def optim_step(self) -> float:
        """Return the gradient's norm."""
        norm = torch.nn.utils.clip_grad_norm_(self._reference.adapter.values(), self._clip or float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm.item()


def _targets(lora: Trainable) -> str:
    """Return PEFT's target_modules: parts of the language model's layers, and the head."""
    flags = {r"((q|k|v|o|out)_proj|in_proj_\w+)": lora.train_attn, "(gate|up|down)_proj": lora.train_mlp}
    parts = [rf"language_model.*\.{part}" for part, is_trained in flags.items() if is_trained]
    return rf".*({'|'.join([*parts, 'lm_head'] if lora.train_unembed else parts)})"
