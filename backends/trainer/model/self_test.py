"""Start-up check: packed scoring must equal the model's own forward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from tinker_server.backends.families.linear_attention import DELTA_RULES
from tinker_server.backends.families.logits import logit_transform
from tinker_server.backends.inputs.rendering import Rendered, Renderer
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.distributed import Root
from tinker_server.backends.trainer.lora.linear import SUMMED_TOKENS, add_product
from tinker_server.backends.trainer.model import attention
from tinker_server.backends.trainer.model.linear_attention import in_plain_torch
from tinker_server.backends.trainer.model.packing import Sample, pack
from tinker_server.backends.trainer.model.token_logprobs import Scorer

Differences = tuple[float, float]
"""The mean of the text where it is largest, and the largest of all tokens, in nats."""
_WIDTHS = (8, 40, 128)
"""Summed ranks with which products are tried at start."""
_SUMMED = (4096, 8192, 14592)
"""Tokens of these products; up to 9 are added."""
_TOLERANCE = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.1, 0.3)}
"""Bounds of the mean and the largest difference of a text's log probabilities, in nats. In bfloat16, rounding alone
made 0.018 and 0.076 on a CPU (36 layers), and 0.037 on average between engine and trainer of a mixture on an H200.
Samples that attend to each other differ by 0.25 and 0.96 and more."""
_OF_DELTA_RULE = (0.2, 0.8)
"""The same in bfloat16 for a model with the delta rule and transformers' own forward, which rounds more: 0.143 on
average on an H100, with random weights in the shape of a published model of 4 billion parameters."""
_OF_ITS_ROUNDING = 3
"""Times the change that rounding a model's embeddings otherwise makes by its own forward: a model that amplifies
rounding is allowed that much, where it is more. SmolLM2-135M in bfloat16 changes by 0.07 to 0.15 nats on average, and
our forward on an H200 differed from its own by 0.12. What is wrong is amplified likewise."""


@dataclass(frozen=True)
class OwnScores:
    """Nats [T, 1] of each of two short texts, by a model's own forward: as it is, and from embeddings rounded
    otherwise."""

    exact: list[Tensor]
    rounded: list[Tensor]


def own_logprobs(root: Root, renderer: Renderer, device: torch.device) -> OwnScores:
    """Score two short texts by the forward of the model as loaded.

    Raises BackendFailed if that forward does more than its decoder and its head, which we would leave out.
    """
    samples = _samples(renderer)
    exact = [_own_logprobs(root, *sample, device) for sample in samples]
    made = torch.Generator().manual_seed(0)

    def round_otherwise(_: nn.Module, __: object, embeddings: Tensor) -> Tensor:
        signs = torch.randint(0, 2, embeddings.shape, generator=made).to(embeddings.device) * 2 - 1
        return (embeddings.float() * (1 + signs * torch.finfo(embeddings.dtype).eps / 2)).to(embeddings.dtype)

    hook = root.model.get_input_embeddings().register_forward_hook(round_otherwise)
    rounded = [_own_logprobs(root, *sample, device) for sample in samples]
    hook.remove()
    return OwnScores(exact, rounded)


def packing_is_exact(scorer: Scorer, renderer: Renderer, own: OwnScores, device: torch.device) -> bool:
    """Compare our scoring with what `own_logprobs` gave before the model took LoRA.

    Raises BackendFailed if one text alone already differs. Returns whether packing the two changes nothing.
    """
    samples = _samples(renderer)
    scorer.weights.load([])

    def scored(*packed: Sample) -> Tensor:
        batch = pack(packed, renderer.family, device)
        with torch.no_grad():
            scores: Tensor = scorer(batch, scorer.weights.blank(len(batch.targets_TK)))
        return scores

    alone = [scored(sample) for sample in samples]
    kinds = {type(layer).__module__ for layer in scorer.model.get_decoder().layers}
    rounds_more = scorer.model.dtype == torch.bfloat16 and not kinds.isdisjoint(DELTA_RULES)
    tolerance = _TOLERANCE[scorer.model.dtype]
    noise = _differences(own.rounded, own.exact)
    if not _agree(alone, own.exact, _OF_DELTA_RULE if rounds_more else tolerance, noise):
        average = (torch.cat(alone) - torch.cat(own.exact)).abs().mean().item()
        divided = f" with its tokens divided over {scorer.context.size} ranks" if scorer.context.size > 1 else ""
        raise BackendFailed(
            f"{type(scorer.model).__name__} is not supported{divided}: its own log probabilities and those of its last"
            f" hidden state through its head differ by {average:.3g} nats on average"
        )
    return _agree(scored(*samples).split([len(one) for one in alone]), alone, tolerance, noise)


def scores_agree(scores: Sequence[Tensor], others: Sequence[Tensor], dtype: torch.dtype, own: OwnScores) -> bool:
    """Return whether two ways to score the same texts differ by no more than rounding."""
    return _agree(scores, others, _TOLERANCE[dtype], _differences(own.rounded, own.exact))


def differences_of_rounding(dtype: torch.dtype, own: OwnScores) -> Differences:
    """Return how far two ways to score texts may be apart: by rounding, or a multiple of the model's own noise."""
    mean, largest = _widen(_TOLERANCE[dtype], _differences(own.rounded, own.exact))
    return mean, largest


def _widen(tolerance: Differences, noise: Differences) -> list[float]:
    return [max(bound, _OF_ITS_ROUNDING * value) for bound, value in zip(tolerance, noise, strict=True)]


def _agree(scores: Sequence[Tensor], others: Sequence[Tensor], tolerance: Differences, noise: Differences) -> bool:
    """Return whether scores differ by at most the tolerance, or a multiple of the model's own noise. NaN never does."""
    found = _differences(scores, others)
    return all(value <= bound for value, bound in zip(found, _widen(tolerance, noise), strict=True))


def _differences(scores: Sequence[Tensor], others: Sequence[Tensor]) -> Differences:
    differences = [(one - other).abs() for one, other in zip(scores, others, strict=True)]
    mean = torch.stack([difference.mean() for difference in differences]).amax()
    return mean.item(), torch.cat(differences).amax().item()


def require_whole_products(sizes: Iterable[int], device: torch.device) -> None:
    """Raise BackendFailed if the gradient of an adapter of these inputs or outputs lacks a microbatch's last tokens.

    `lora/linear.py:add_product` names the kernels known to lose them; this finds others. The numbers are small and
    whole, so that their sums are exact.
    """
    for size in sizes:
        right = torch.randint(-1, 2, (max(_SUMMED) + SUMMED_TOKENS, size), device=device).to(torch.bfloat16)
        for width, base, left_over in product(_WIDTHS, _SUMMED, range(10)):
            num_tokens = base + left_over
            left = torch.zeros(num_tokens, width, dtype=torch.bfloat16, device=device)
            left[-SUMMED_TOKENS:] = 1
            total = torch.zeros(width, size, device=device)
            add_product(total, left, right[:num_tokens])
            if not torch.equal(total[0], right[num_tokens - SUMMED_TOKENS : num_tokens].sum(0, dtype=torch.float32)):
                raise BackendFailed(
                    f"a product of {num_tokens} tokens, rank {width} and {size} outputs lacks the last of them on"
                    f" this GPU ({torch.version.cuda}): gradients would be wrong; another version of cuBLAS is needed"
                )


def _samples(renderer: Renderer) -> list[Sample]:
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, renderer.vocab_size, length) for length in (12, 9)]
    # Random ids may hit a placeholder, which a text must not hold.
    return [(Rendered(without_placeholders(text, renderer), [], []), np.roll(text, -1)) for text in texts]


def without_placeholders(text: np.ndarray, renderer: Renderer) -> np.ndarray:
    """Return a text with another token in place of those that stand for images."""
    return np.where(np.isin(text, list(renderer.family.placeholders)), 0, text)


def _transformed(config: PretrainedConfig, of_head: Tensor, logits: Tensor) -> bool:
    """Return whether the model's logits are the head's, as its kind transforms them, to the model's rounding."""
    transform = logit_transform(config.get_text_config())
    if transform.is_identity:
        return torch.equal(of_head.float(), logits.float())
    allowed = max(torch.finfo(logits.dtype).eps, 1e-6)  # each of three operations is rounded by half of eps
    return torch.allclose(transform.apply(of_head.float().clone()), logits.float(), rtol=allowed, atol=allowed)


def _own_logprobs(root: Root, sample: Rendered, targets: np.ndarray, device: torch.device) -> Tensor:
    input_ids = torch.from_numpy(sample.token_ids_T)[None].to(device)
    length = input_ids.shape[1]
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    extra = attention.varlen_arguments(cu_seqlens.to(device), cu_seqlens, length)
    seen: list[Tensor] = []
    hooks = [
        root.model.base_model.register_forward_hook(lambda _, __, output: seen.append(output.last_hidden_state)),
        root.model.get_output_embeddings().register_forward_hook(
            lambda _, inputs, output: seen.extend((inputs[0], output))
        ),
    ]
    with torch.no_grad(), in_plain_torch(root.model.get_decoder()):
        logits: Tensor = root(root.model, input_ids=input_ids, use_cache=False, **extra).logits
    for hook in hooks:
        hook.remove()
    if not (len(seen) == 3 and torch.equal(*seen[:2]) and _transformed(root.model.config, seen[2], logits)):
        raise BackendFailed(
            f"{type(root.model).__name__} is not supported: it does more with its decoder's output than its head alone,"
            " such as a scale or a cap of the logits, which the trainer would leave out"
        )
    return logits[0].float().log_softmax(-1).gather(-1, torch.from_numpy(targets)[:, None].to(device))
