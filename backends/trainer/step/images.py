"""Renders the datums of a packed microbatch. A rank decodes only the images whose pixels it needs, and decodes those of
the next microbatch while the device computes this one. Where the base takes no images, nothing is decoded ahead."""

from collections.abc import Container, Sequence
from functools import partial

from tinker_server.backends.inputs.rendering import Rendered, images_of
from tinker_server.backends.protocol import BackendFailed, InvalidInput
from tinker_server.backends.trainer.base_model import BaseModel
from tinker_server.backends.trainer.distributed import World, agreed_each
from tinker_server.backends.trainer.model.context import slice_of
from tinker_server.backends.trainer.model.packing import num_padding
from tinker_server.backends.trainer.step.batch_request import BatchRequest, Members


def render(
    base: BaseModel, world: World, members: Members
) -> tuple[dict[int, list[Rendered]], dict[int, InvalidInput | BackendFailed]]:
    """Return each request's rendered datums by its number, and the errors of requests that failed on any rank:
    InvalidInput for images that do not decode."""
    known = {} if base.vision is None else prefetch(base, world, members)
    # The tower of a sharded base is all-gathered with the rest, when the microbatch is computed.
    vision = base.vision if world.device.type == "cuda" and not base.is_sharded else None

    def render_datums(request: BatchRequest, indices: Sequence[int], known: Container[str]) -> list[Rendered]:
        rendered = []
        for index in indices:
            model_input, layout = request.data[index].model_input, request.layouts[index]
            rendered.append(base.renderer.render(model_input, f"datum {index}", known, layout))
            if vision is not None and not request.model.config.train_vision:
                with base.renderer.prefetcher.pause():
                    vision.begin([image for image in rendered[-1].images if image.hash not in known], world.device)
        return rendered

    renders = {
        member.number: partial(render_datums, member, members[member], known.get(member, ())) for member in members
    }
    return agreed_each(renders, world)


def prefetch(base: BaseModel, world: World, members: Members) -> dict[BatchRequest, Container[str]]:
    """Start to decode the images whose pixels this rank needs. Return by request the hashes of those that it does not
    need: the frozen tower has seen them, or they are in other ranks' slices of the microbatch."""
    known: dict[BatchRequest, Container[str]] = {}
    elsewhere = _images_elsewhere(members, world) if world.num_slices > 1 else None
    for request, indices in members.items():
        inputs = [(request.data[index].model_input, request.layouts[index]) for index in indices]
        seen: Container[str] = () if request.model.config.train_vision or base.vision is None else base.vision
        if elsewhere is None:
            known[request] = seen
        else:
            names = [name for one in inputs for name, _, _ in images_of(*one)]
            known[request] = elsewhere.union(name for name in names if name in seen)
        base.renderer.prefetch(inputs, known[request])
    return known


def _images_elsewhere(members: Members, world: World) -> set[str]:
    """Return the hashes of images of which this rank's slice of the microbatch has no token."""
    datums = [(request, index) for request, indices in members.items() for index in indices]
    lengths = [request.lengths[index] for request, index in datums]
    tokens = slice_of(sum(lengths) + num_padding(lengths), world.context)
    here, elsewhere, begin = set[str](), set[str](), 0
    for request, index in datums:
        for name, _, span in images_of(request.data[index].model_input, request.layouts[index]):
            first = begin + span.offset
            is_here = first < tokens.stop and tokens.start < first + span.num_tokens
            (here if is_here else elsewhere).add(name)
        begin += request.lengths[index]
    return elsewhere - here
