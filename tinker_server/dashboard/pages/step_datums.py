"""The datums of a run's step: the answers of one prompt, and those with the largest gradients or losses."""

import itertools
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from tinker_server.api_schemas.inputs import ImageChunk, ModelInput
from tinker_server.backends.protocol import BaseModel
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.curves import END, Bound
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.texts import Part, prompt_parts, texts_of
from tinker_server.dashboard.thumbnails import thumbnail
from tinker_server.dashboard.viewer import Viewing
from tinker_server.errors import UnknownSampler
from tinker_server.observability.kept_datums import KeptBatch, KeptDatum
from tinker_server.offload import LARGE, off_loop
from tinker_server.web.deps import Server

router = APIRouter(prefix="/runs/{run_id}/datums", route_class=PageRoute, include_in_schema=False)
UP, DOWN, STILL = "up", "down", "still"
"""What a step does to a token: it makes it likelier, less likely, or neither."""


@dataclass(frozen=True)
class PushedToken:
    """A token of a datum as it is shown."""

    text: str
    logprob: float
    push: float
    direction: str
    is_special: bool


@dataclass(frozen=True)
class ShownDatum:
    """A datum as it is shown."""

    datum: KeptDatum
    prompt: list[Part]
    tokens: list[PushedToken]


@dataclass(frozen=True)
class ShownBatch:
    """A batch as it is shown."""

    batch: KeptBatch
    group: list[ShownDatum]
    largest: list[ShownDatum]


@router.get("")
async def show_datums(request: Request, run_id: str, server: Server, viewer: Viewing, step: Bound = END) -> Response:
    """Show the datums of a step, else of the nearest before it that has some."""
    run = await server.runs.require(run_id, viewer.owner)
    kept = [batch for batch in server.gallery.batches_of_run(viewer.owner, run_id) if batch.step <= step]
    nearest = max((batch.step for batch in kept), default=None)
    base = server.models.served.get(run.base_model)
    chosen = [batch for batch in reversed(kept) if batch.step == nearest]
    shown = [await off_loop(viewer.owner, LARGE, _render, base, batch) for batch in chosen]
    values = {"run_id": run_id, "step": nearest, "is_exact": step in (nearest, END), "batches": shown}
    return page(request, "run_datums.html", values)


async def _batch(run_id: str, record_id: str, server: Server, viewer: Viewing) -> KeptBatch:
    """Return a batch of the viewer's run. Raises UnknownSampler, also for another owner's."""
    batches = server.gallery.batches_of_run(viewer.owner, run_id)
    found = next((batch for batch in batches if batch.sample_id == record_id), None)
    if found is None:
        raise UnknownSampler("these datums are no longer kept")
    return found


Chosen = Annotated[KeptBatch, Depends(_batch)]


@router.get("/{record_id}/images/{number}")
async def show_image(batch: Chosen, number: int) -> Response:
    """Return an image of the batch's prompts, as it was sent."""
    image = _image(batch, number)
    return Response(image.data, media_type=f"image/{image.format}")


@router.get("/{record_id}/thumbnails/{number}")
async def show_thumbnail(batch: Chosen, number: int) -> Response:
    """Return a small form of an image of the batch's prompts."""
    image = _image(batch, number)
    made = await thumbnail(batch.owner, batch.sample_id, number, image.data)
    if made is None:
        return Response(image.data, media_type=f"image/{image.format}")
    return Response(made, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})


def _images(prompt: ModelInput) -> list[ImageChunk]:
    return [chunk for chunk in prompt.chunks if isinstance(chunk, ImageChunk)]


def _image(batch: KeptBatch, number: int) -> ImageChunk:
    """Return an image by its number among those of all prompts. Raises UnknownSampler."""
    images = list(itertools.chain(*map(_images, batch.prompts.values())))
    if not 0 <= number < len(images):
        raise UnknownSampler(f"image {number}: the datums have {len(images)} images")
    return images[number]


def _render(base: BaseModel | None, batch: KeptBatch) -> ShownBatch:
    prompts: dict[int, list[Part]] = {}
    num_images = 0
    for number, prompt in batch.prompts.items():
        prompts[number] = prompt_parts(base, prompt.chunks, num_images)
        num_images += len(_images(prompt))
    group, largest = (
        [ShownDatum(datum, prompts[datum.prompt], _tokens(base, datum)) for datum in datums]
        for datums in (batch.group, batch.largest)
    )
    return ShownBatch(batch, group, largest)


def _tokens(base: BaseModel | None, datum: KeptDatum) -> list[PushedToken]:
    token_ids: list[int] = datum.tokens.tolist()
    texts, special = texts_of(base, token_ids)
    return [
        PushedToken(text, logprob, push, UP if push > 0 else DOWN if push < 0 else STILL, token_id in special)
        for text, token_id, logprob, push in zip(
            texts, token_ids, datum.logprobs.tolist(), datum.push.tolist(), strict=True
        )
    ]
