"""Whether tokens that datums share may be computed once: what is known of the model, and a check at start."""

import logging

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinker_server.backends.families.family import Family
from tinker_server.backends.formats.load_check import image_and_text, load_check_image
from tinker_server.backends.inputs.rendering import Rendered, Renderer
from tinker_server.backends.kernels.carried_state import MOST_BEFORE
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.distributed import World, gather_objects
from tinker_server.backends.trainer.model.packing import Sample, pack
from tinker_server.backends.trainer.model.self_test import OwnScores, scores_agree, without_placeholders
from tinker_server.backends.trainer.model.shared_prefixes import Trie, trie_of_three
from tinker_server.backends.trainer.model.token_logprobs import Scorer

log = logging.getLogger(__name__)
_PREFIX, _MIDDLE, _WHOLE = 7, 9, (18, 15, 19)
"""Tokens of the check: three texts have the first in common, two of them the second too, which is fewer tokens than a
convolution reads."""


def may_share(scorer: Scorer, family: Family, max_context_length: int, world: World) -> bool:
    """Return whether this model's datums may share tokens, by what is known of it; if not, log the reason."""
    reason = _why_whole(scorer, family, max_context_length, world)
    if reason is not None:
        log.info("datums that begin alike are computed whole: %s", reason)
    return reason is None


def _why_whole(scorer: Scorer, family: Family, max_context_length: int, world: World) -> str | None:
    """Return the reason why this model's datums are computed whole, None if they need not be."""
    config = scorer.model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    kinds = set(layers or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if layers is None or "sliding_attention" in layers else None
    if window and window < max_context_length:
        return f"tokens see {window} others, fewer than a context of {max_context_length} has"
    if window:
        kinds.discard("sliding_attention")
    if family.has_linear_attention or family.has_state_space:
        kinds -= {"linear_attention", "mlp", "moe"}
        if (width := _widest_convolution(scorer.model)) > MOST_BEFORE + 1:
            return f"its convolutions read {width} tokens, and more than {MOST_BEFORE + 1} are not shared"
    if kinds:
        return f"its layers are of the kinds {', '.join(sorted(kinds))}"
    if family.sees_whole_images:
        return "tokens of an image see those behind them"
    if world.num_slices > 1:
        return "ranks have slices of the tokens"
    return None


def _widest_convolution(model: PreTrainedModel) -> int:
    modules = model.get_decoder().modules()
    return max((module.kernel_size[0] for module in modules if isinstance(module, nn.Conv1d)), default=0)


def sharing_is_exact(scorer: Scorer, renderer: Renderer, own: OwnScores, world: World) -> bool:
    """Compare texts that share prefixes, and behind an image too if the model takes images, with the same texts whole.
    All ranks find the same. Logs what differs."""
    scorer.weights.load([])
    kinds = [_samples(renderer)]
    if renderer.takes_images:
        kinds.append(_samples(renderer, renderer.render(image_and_text(load_check_image(), []), "the image of a test")))
    try:
        is_exact = all(_is_exact(scorer, renderer, samples, own, world.device) for samples in kinds)
    except BackendFailed as error:  # a kernel that gives other numbers
        log.warning("%s", error)
        is_exact = False
    is_exact = all(gather_objects(is_exact, world))
    if not is_exact:
        log.warning("datums that begin alike are computed whole: sharing changes log probabilities here")
    return is_exact


def _is_exact(scorer: Scorer, renderer: Renderer, samples: list[Sample], own: OwnScores, device: torch.device) -> bool:
    lengths = [len(rendered.token_ids_T) for rendered, _ in samples]
    more = lengths[0] - _WHOLE[0]

    def score(trie: Trie | None) -> Tensor:
        batch = pack(samples, renderer.family, device, trie)
        with torch.no_grad():
            return batch.of_samples(scorer(batch, scorer.weights.blank(len(batch.targets_TK))))

    shared = trie_of_three(more + _PREFIX, more + _MIDDLE, [more + length for length in _WHOLE])
    found, whole = (score(trie).split(lengths) for trie in (shared, None))
    return scores_agree(found, whole, scorer.model.dtype, own)


def _samples(renderer: Renderer, image: Rendered | None = None) -> list[Sample]:
    generator = np.random.default_rng(0)
    text = without_placeholders(generator.integers(0, renderer.vocab_size, (3, max(_WHOLE))), renderer)
    text[:, :_PREFIX], text[2, :_MIDDLE] = text[0, :_PREFIX], text[1, :_MIDDLE]
    samples = []
    for own, length in zip(text, _WHOLE, strict=True):
        begin = image or Rendered(np.zeros(0, np.int64), [], [])
        tokens = np.concatenate([begin.token_ids_T, own[:length]])
        samples.append(
            (Rendered(tokens, begin.spans, begin.images), without_placeholders(np.roll(tokens, -1), renderer))
        )
    return samples
