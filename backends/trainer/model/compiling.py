"""Compile the decoder's layers before the first request, once for all layers, lengths, ranks and mixes of models."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from tinker_server.backends.families.family import ImageSpan
from tinker_server.backends.families.linear_attention import SCANS
from tinker_server.backends.inputs.rendering import Rendered, Renderer
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora.experts import LoraExperts
from tinker_server.backends.trainer.model import targets
from tinker_server.backends.trainer.model.packing import Microbatch, pack
from tinker_server.backends.trainer.model.recompute import Recomputation
from tinker_server.backends.trainer.model.shared_prefixes import Trie, trie_of_three
from tinker_server.backends.trainer.model.token_logprobs import Scorer

log = logging.getLogger(__name__)
_WARM_UP_LENGTHS = (2003, 1998)
"""Their sum should be no width of a model: a length that equals one is taken for it. It should be large, as in slow
microbatches: the kernels chosen are the fastest for it."""
_LEAST_WARM_UP = 128
"""Tokens of the shortest text by which it is tried again."""
_MOST_COMPILED = 64
"""Gemma 3 with images, of two kinds of layers, was seen to need more than 8."""


def can_be_compiled(layer: nn.Module) -> bool:
    """Return whether a layer is compiled, and captured in graphs. Mamba2 is a loop over chunks in Python: the code
    would be for one number of them."""
    return type(layer).__module__ not in SCANS or not any(isinstance(module, nn.Conv1d) for module in layer.modules())


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer that can be at its first call."""
    layers = list(layers)
    # Norms and silu(gate) * up are then recomputed in backward, not saved: a quarter less memory, 1 % more time.
    targets.KEEP_MATERIALIZED.replace(False)
    targets.KEEP_FAR_APART.replace(False)
    # Rotated queries and keys too, which hold a concatenation. Our own operators are never recomputed; nor is a
    # router's choice, which could differ if two experts are equal.
    has_experts = any(isinstance(module, LoraExperts) for layer in layers for module in layer.modules())
    targets.KEEP_NOT_ALLOWED.replace(has_experts)
    targets.KEEP_OPERATORS.replace(not has_experts)
    targets.MOST_COMPILED.replace(_MOST_COMPILED)
    for layer in layers:
        if can_be_compiled(layer):
            layer.compile(dynamic=True, backend=_with_linears_merged)


def _with_linears_merged(
    module: fx.GraphModule, inputs: list[Tensor | int | torch.SymInt | None]
) -> Callable[..., object]:
    merge_linears(module.graph)
    module.recompile()
    compiled: Callable[..., object] = torch._inductor.compile(module, inputs)
    return compiled


def merge_linears(graph: fx.Graph) -> None:
    """Merge linears of the same x, such as queries, keys and values, into one operator: it reads x once for the
    adapters of all, and gives one gradient of it."""
    siblings: dict[tuple[fx.Node, fx.Node], list[fx.Node]] = {}
    operator = torch.ops.tinker_server.lora_linears.default
    for node in graph.find_nodes(op="call_function", target=operator):
        x, *_, scales_TR, _, _ = node.args
        siblings.setdefault((x, scales_TR), []).append(node)
    for (x, scales_TR), nodes in siblings.items():
        args: list[tuple[Any, ...]] = [node.args for node in nodes]
        tensors = [list(chain(*kind)) for kind in zip(*(own[1:6] for own in args), strict=True)]
        if len(nodes) == 1 or any(tensor.op not in ("placeholder", "get_attr") for kind in tensors for tensor in kind):
            continue
        # A place begins with the linear that it is in.
        places = [n if i % 4 else index for index, own in enumerate(args) for i, n in enumerate(own[7])]
        outputs = [num_outputs for own in args for num_outputs in own[8]]
        with graph.inserting_before(nodes[0]):
            merged = graph.call_function(operator, (x, *tensors, scales_TR, places, outputs))
        for index, node in enumerate(nodes):
            for output in list(node.users):
                assert output.args == (node, 0)  # the inner products are for backward alone
                output.args = (merged, index)
            graph.erase_node(node)


def warm_up(  # noqa: PLR0913
    scorer: Scorer,
    renderer: Renderer,
    world: World,
    layers: Recomputation,
    *,
    is_coupled: bool,
    carries: bool = False,
    longest: int | None = None,
) -> None:
    """Compile what serving needs, with a gradient and without: nothing is then compiled while it serves. `carries`:
    layers carry states along texts that share beginnings.

    A large base may lack the memory for this text: then it is compiled by shorter ones. Ranks that wait for each other
    in it (`is_coupled`) could not fail apart: their layers recompute, which takes the least memory, and the text is no
    longer than the `longest` for which they have room.
    """
    began = time.monotonic()
    log.info("compiling the decoder's layers, which takes about half a minute")
    slices, lengths = world.context.size, list(_WARM_UP_LENGTHS)
    while is_coupled and longest and slices * sum(lengths) > longest and min(lengths) > _LEAST_WARM_UP:
        lengths = [length // 2 for length in lengths]
    layers.use(layers.num_layers if is_coupled else 0)

    def runs() -> bool:
        can_fail = not is_coupled and min(lengths) > _LEAST_WARM_UP
        of_all_slices = [slices * length for length in lengths]
        return _runs(scorer, renderer, world, of_all_slices, can_fail=can_fail, carries=carries)

    while not runs():
        torch.cuda.empty_cache()
        lengths = [length // 2 for length in lengths]
    layers.use(0)
    log.info("compiled in %.0f s, by a microbatch of %d tokens", time.monotonic() - began, slices * sum(lengths))


def _runs(  # noqa: PLR0913
    scorer: Scorer, renderer: Renderer, world: World, lengths: Sequence[int], *, can_fail: bool, carries: bool
) -> bool:
    """Run texts of these lengths in all ways; return False if they take too much memory and this `can_fail`."""
    try:
        for with_gradient in (True, False):
            with torch.set_grad_enabled(with_gradient):
                run_text(scorer, renderer, world, lengths)
                if renderer.family.sees_whole_images:  # layers are compiled once more, and their kernel is tested
                    run_text(scorer, renderer, world, lengths, with_image=True)
                if carries:  # and so are layers that carry states
                    first, second = lengths
                    trie = trie_of_three(first // 2, first * 2 // 3, [first, second, second - 3])
                    _run(scorer, text_microbatch(renderer, world, trie.lengths, trie=trie))
    except torch.OutOfMemoryError:
        if not can_fail:
            raise
        return False
    return True


def run_text(
    scorer: Scorer, renderer: Renderer, world: World, lengths: Sequence[int], *, with_image: bool = False
) -> None:
    """Run a microbatch of made-up texts through the base alone, and backward if gradients are enabled. `with_image`:
    the first begins with the tokens of an image, without its features."""
    _run(scorer, text_microbatch(renderer, world, lengths, with_image=with_image))


def _run(scorer: Scorer, batch: Microbatch) -> None:
    scorer.weights.load([])
    logprobs_TK = scorer(batch, scorer.weights.blank(len(batch.targets_TK)))
    if torch.is_grad_enabled():
        logprobs_TK.sum().backward()


def text_microbatch(
    renderer: Renderer, world: World, lengths: Sequence[int], *, with_image: bool = False, trie: Trie | None = None
) -> Microbatch:
    """Pack made-up texts of these lengths, the first one as `run_text` says, or as a trie."""
    texts, vision = [np.zeros(length, np.int64) for length in lengths], renderer.family.vision
    spans: list[list[ImageSpan]] = [[] for _ in texts]
    if with_image and vision is not None:
        grid = vision.grid(64, 64)
        span = ImageSpan(0, vision.num_tokens(grid), grid, 64 * 64)
        texts[0][: span.num_tokens] = vision.image_ids(span)
        spans[0].append(span)
    samples = [(Rendered(text, own, []), text) for text, own in zip(texts, spans, strict=True)]
    return pack(samples, renderer.family, world.device, trie)
