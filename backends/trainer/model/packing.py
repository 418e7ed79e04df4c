"""Pack datums into microbatches: whole samples, one token budget, about as many tokens on every rank.

A packed microbatch holds several samples one after the other. Position ids restart at each; so the model keeps them
from attending to one another. Samples that begin alike may be packed as a trie of segments (`shared_prefixes.py`): a
segment is then packed as a sample is, with the position ids that it has in its samples.

T tokens of the microbatch, K targets of a token, I images, F features of an image
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinker_server.api_schemas.inputs import Datum
from tinker_server.backends.families.family import Family, RenderedImage
from tinker_server.backends.inputs.rendering import Rendered
from tinker_server.backends.kernels import carried_state
from tinker_server.backends.kernels.carried_state import Carried
from tinker_server.backends.kernels.pinned_copy import to_device
from tinker_server.backends.kernels.shared_prefix import tables
from tinker_server.backends.trainer.model.shared_prefixes import Trie
from tinker_server.backends.trainer.step.losses import Loss, LossInputs

_BISECTIONS = 8
"""Bisections of a microbatch's size: 1/256 of the budget is even enough."""


def plan_steps(lengths: Sequence[int], side_by_side: int, max_tokens: int) -> list[list[list[int]]]:
    """Plan the microbatches of every rank: plan[step][rank] is a list of datum indices, the longest microbatches first.
    Ranks that compute slices of one microbatch count as one.

    There are as few steps as microbatches of `max_tokens` need, and the microbatches are then as even as possible, so
    that no rank waits for another; one with nothing to do is empty. A datum of more than `max_tokens` is alone. Depends
    on its arguments only, so that all ranks make the same plan without asking each other.
    """
    parts = _first_fit(lengths, max_tokens)
    num_parts = side_by_side * math.ceil(len(parts) / side_by_side)
    too_small = max(max(lengths), math.ceil(sum(lengths) / num_parts)) - 1
    small_enough = max_tokens
    for _ in range(_BISECTIONS if too_small < max_tokens and num_parts > 1 else 0):
        if (size := (too_small + small_enough + 1) // 2) == small_enough:
            break
        if len(smaller := _first_fit(lengths, size)) <= num_parts:
            parts, small_enough = smaller, size
        else:
            too_small = size
    parts = sorted((sorted(part) for part in parts), key=lambda part: -sum(lengths[index] for index in part))
    parts += [[] for _ in range(-len(parts) % side_by_side)]
    return [parts[start : start + side_by_side] for start in range(0, len(parts), side_by_side)]


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Assign the longest first, each to the first part that has room."""
    parts: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for part, total in enumerate(used):
            if total + lengths[index] <= max_tokens:
                parts[part].append(index)
                used[part] += lengths[index]
                break
        else:
            parts.append([index])
            used.append(lengths[index])
    return parts


@dataclass(frozen=True)
class Microbatch:
    """A packed microbatch on the device."""

    model_inputs: dict[str, Tensor]
    """Token and position ids, named as in the model's forward."""
    images: list[RenderedImage]
    """Images in the order of their placeholders."""
    cu_seqlens: Tensor
    """[samples + 1] int32: first token of each sample, and end of the last."""
    cu_seqlens_host: Tensor
    """The same, on the host."""
    max_seqlen: int
    targets_TK: Tensor
    tower_scales: Sequence[Tensor | None] = ()
    """By image, its model's scales [R] if that trains the vision tower, else None; empty: none does."""
    feature_tokens: Callable[[], list[np.ndarray]] = list
    """Finds by image the indices of the whole microbatch's tokens whose embeddings its features replace."""
    whole_images_IF: Tensor | None = None
    """By image, indices of the whole microbatch's tokens that see each other; None: no image's do."""
    feature_parts: Sequence[slice] | None = None
    """By image, those of its features that a slice of a microbatch has; None: all."""
    experts_LTK: Tensor | None = None
    """Experts as `RouterReplay.batch` gives them; None: routers choose."""
    shared: tuple[Tensor, Tensor] | None = None
    """Segments that others see, as `shared_prefix.tables` gives them, the first on the device; None: there are none,
    and `cu_seqlens` are those of samples, else of segments."""
    carried: Carried | None = None
    """What layers that carry a state need where `shared` is there; None: there are no such layers."""
    places_NK: Tensor | None = None
    """For the targets of all samples, sample by sample, their places in the targets of the microbatch; None:
    they are the microbatch's own."""

    def of_samples(self, values_TK: Tensor) -> Tensor:
        """Return [N, K], the values of the samples' targets, sample by sample, from those of the microbatch's."""
        return values_TK if self.places_NK is None else values_TK.flatten()[self.places_NK]


def num_padding(lengths: Sequence[int]) -> int:
    """Return the padding in tokens: two for a microbatch without samples, of a rank that only takes part in
    collectives, or without a sample of two tokens. Code compiled for any number of tokens is recompiled for one."""
    return 0 if max(lengths, default=0) >= 2 else 2


Sample = tuple[Rendered, np.ndarray]
"""An input, and its targets [N] or [N, K]."""


def pack(samples: Sequence[Sample], family: Family, device: torch.device, trie: Trie | None = None) -> Microbatch:
    """Pack samples, with the padding of `num_padding`: a sample of no request, at the end. `trie`: their segments, if
    they share some."""
    if missing := num_padding([len(rendered.token_ids_T) for rendered, _ in samples]):
        samples = [*samples, (Rendered(np.zeros(missing, np.int64), [], []), np.zeros(missing, np.int64))]
    inputs = [rendered for rendered, _ in samples]
    positions = [family.position_ids(len(rendered.token_ids_T), rendered.spans) for rendered in inputs]
    targets_TK, shared = _side_by_side([targets for _, targets in samples], 0), None
    places, carried = None, None
    if trie is not None and trie.saved:
        assert not missing, "what is shared has more tokens than padding is for"
        targets_TK, places = _common_targets(targets_TK, trie)
        bounds, table = tables(trie.spans())
        shared = to_device(bounds, device), table
        if family.has_linear_attention or family.has_state_space:
            of = carried_state.tables(trie.begins, [segment.parent for segment in trie.segments])
            carried = Carried(to_device(of.calls, device), to_device(of.tails, device), of.parents_host)
        inputs, positions = _cut(inputs, positions, trie)
    lengths = [len(rendered.token_ids_T) for rendered in inputs]
    token_ids = np.concatenate([rendered.token_ids_T for rendered in inputs])[None]
    model_inputs = {
        "input_ids": to_device(torch.from_numpy(token_ids), device),
        "position_ids": to_device(torch.from_numpy(np.concatenate(positions, axis=-1)), device),
    }
    ends = np.concatenate([[0], np.cumsum(lengths)])
    cu_seqlens = torch.from_numpy(ends.astype(np.int32))
    feature_tokens = partial(_feature_tokens, inputs, ends[:-1], family)
    sees_images = family.sees_whole_images and any(rendered.spans for rendered in inputs)
    return Microbatch(
        model_inputs,
        [image for rendered in inputs for image in rendered.images],
        to_device(cu_seqlens, device),
        cu_seqlens,
        max(lengths),
        to_device(torch.from_numpy(targets_TK), device),
        feature_tokens=feature_tokens,
        whole_images_IF=to_device(torch.from_numpy(np.stack(feature_tokens())), device) if sees_images else None,
        shared=shared,
        carried=carried,
        places_NK=None if places is None else to_device(torch.from_numpy(places), device),
    )


def _cut(
    inputs: Sequence[Rendered], positions: Sequence[np.ndarray], trie: Trie
) -> tuple[list[Rendered], list[np.ndarray]]:
    """Return each segment as if it were an input, and its positions."""
    cut, of_cut = [], []
    for segment in trie.segments:
        whole, tokens = inputs[segment.datum], slice(segment.begin, segment.end)
        spans, images = [], []
        for span, image in zip(whole.spans, whole.images, strict=True):
            if tokens.start <= span.offset < tokens.stop:
                assert span.offset + span.num_tokens <= tokens.stop, "an image is in the segment in which it begins"
                spans.append(replace(span, offset=span.offset - tokens.start))
                images.append(image)
        cut.append(Rendered(whole.token_ids_T[tokens], spans, images))
        of_cut.append(positions[segment.datum][..., tokens])
    packed = np.concatenate(of_cut, axis=-1)
    for datum, own in enumerate(positions):
        assert np.array_equal(packed[..., trie.tokens_of(datum)], own), "positions depend on what is before them alone"
    return cut, of_cut


def _common_targets(targets_NK: np.ndarray, trie: Trie) -> tuple[np.ndarray, np.ndarray]:
    """Return the different targets [T, K'] of each packed token, from those of all samples, and the places of these in
    them [N, K], counted row by row."""
    token_N = np.concatenate([trie.tokens_of(datum) for datum in range(len(trie.lengths))])
    most = int(targets_NK.max()) + 1
    different, of_different = np.unique(token_N[:, None] * most + targets_NK, return_inverse=True)
    token_D = different // most
    column_D = np.arange(len(different)) - np.searchsorted(token_D, token_D)
    width = int(column_D.max()) + 1
    found_TK = np.zeros((trie.num_tokens, width), np.int64)
    found_TK[token_D, column_D] = different % most
    return found_TK, (token_D * width + column_D)[of_different.reshape(targets_NK.shape)]


def _feature_tokens(samples: Sequence[Rendered], begins: np.ndarray, family: Family) -> list[np.ndarray]:
    """Implement `Microbatch.feature_tokens`."""
    return [
        begin + feature
        for begin, rendered in zip(begins, samples, strict=True)
        for feature in _features(rendered, family)
    ]


def _features(rendered: Rendered, family: Family) -> Iterator[np.ndarray]:
    """Yield for each image the tokens whose embeddings its features replace."""
    if family.vision is None:
        return
    for span in rendered.spans:
        own = rendered.token_ids_T[span.offset : span.offset + span.num_tokens]
        yield span.offset + np.flatnonzero(own == family.vision.feature_id)


def loss_inputs(
    loss: Loss, config: Mapping[str, float], datums: Sequence[Datum], device: torch.device
) -> Callable[..., LossInputs]:
    """Return a function of log probabilities [T, K] that gives the datums' loss inputs, in the order of their samples,
    or those of a slice of their tokens. Values beyond a datum's own K are 0. The datums' tensors are on the device
    before."""
    lengths = [len(datum.loss_fn_inputs["target_tokens"]) for datum in datums]
    tensors = {}
    for name in (*loss.required, *loss.optional):
        parts = [_input(loss, config, datum, name) for datum in datums]
        values = _side_by_side(parts, 0.0).astype(np.float32)
        on_device = to_device(torch.from_numpy(values), device)
        tensors[name] = on_device if loss.soft_targets else on_device[:, 0]
    datum_T = to_device(torch.repeat_interleave(torch.arange(len(datums)), torch.tensor(lengths)), device)

    def of_tokens(logprobs_TK: Tensor, tokens: slice = slice(None)) -> LossInputs:
        given = {name: tensor[tokens] for name, tensor in tensors.items()}
        return LossInputs(logprobs_TK, given, config, datum_T[tokens], len(datums))

    return of_tokens


def _input(loss: Loss, config: Mapping[str, float], datum: Datum, name: str) -> np.ndarray:
    given = datum.loss_fn_inputs.get(name)
    if given is not None:
        return given
    fill = loss.optional[name]
    value = config[fill] if isinstance(fill, str) else fill
    return np.full(datum.loss_fn_inputs["target_tokens"].shape, value, np.float32)


def _side_by_side(arrays: Sequence[np.ndarray], fill: float) -> np.ndarray:
    """Concatenate arrays of shape [N] or [N, K'] to [T, K], K the largest K'."""
    parts = [array.reshape(len(array), -1) for array in arrays]
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill) for part in parts])
