"""The latest samples, token by token, with the run, step and reward that they belong to."""

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk
from tinker_server.backends.protocol import BaseModel
from tinker_server.dashboard.code import Draw
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.curves import important_of
from tinker_server.dashboard.pages.runs import find_titles
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.texts import Completion, Part, completion_of, parts_of, prompt_parts
from tinker_server.dashboard.thumbnails import thumbnail
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.errors import UnknownSampler
from tinker_server.observability.recent_samples import Shown
from tinker_server.offload import off_loop
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/samples", route_class=PageRoute, include_in_schema=False)
MOST_OF_RUN = 100
"""Samples of a run in the list."""
PREVIEW_TOKENS = 60
NO_CLIENT = "none"
"""Stands in the filter for samples of base models and of chats, which have no sampling session."""
THUMBNAILS = 4
"""Thumbnails of a sample in the list."""


@dataclass(frozen=True)
class Origin:
    """The place of a sample in training, as far as it is known."""

    run_id: str
    """Run that trained the weights; empty for a base model."""
    step: int | None = None
    """Steps of the run before its weights were saved."""
    reward_name: str = ""
    reward: float | None = None
    """Reward that the client reported for this step."""


@dataclass(frozen=True)
class Preview:
    """A sample of the list."""

    shown: Shown
    origin: Origin
    prompt: list[Part]
    completion: list[Part]
    num_images: int


@dataclass(frozen=True)
class StepSample:
    """A sample beside a run's curves."""

    shown: Shown
    prompt: list[Part]
    completion: Completion | None
    """The beginning of the first continuation."""
    num_images: int


@router.get("")
async def show_samples(request: Request, server: Server, viewer: Viewing, client: str = "", run: str = "") -> Response:
    """Show the list; `client` selects the samples of one sampling session, or those of none, and `run` those of a
    run's weights."""
    found = server.gallery.of(viewer.owner)
    clients = list(dict.fromkeys(shown.sampler_id or NO_CLIENT for shown in found))
    runs = list(dict.fromkeys(shown.of.run_id for shown in found if shown.of.run_id))
    listed = server.gallery.of_run(viewer.owner, run)[:MOST_OF_RUN] if run else found
    listed = [shown for shown in listed if not client or (shown.sampler_id or NO_CLIENT) == client]
    origins = {of: await _origin(server, viewer, shown) for of, shown in {shown.of: shown for shown in listed}.items()}
    previews = [
        await off_loop(viewer.owner, shown.size_bytes, _preview, server, shown, origins[shown.of]) for shown in listed
    ]
    named = runs if not run or run in runs else [*runs, run]
    titles = await find_titles(server, viewer) if named else {}
    offered = {of: titles.get(of, "") for of in named}
    filters = {"clients": clients, "client": client, "no_client": NO_CLIENT, "titles": offered, "run": run}
    values = {"previews": previews, "most_images": THUMBNAILS, "per_owner": server.gallery.per_owner}
    return page(request, "samples.html", {**values, **filters, "on_disk": server.settings.samples_disk_bytes})


@router.get("/{sample_id}")
async def show_sample(request: Request, sample_id: str, server: Server, viewer: Viewing) -> Response:
    """Show one prompt and its continuations."""
    shown = _require(server, viewer, sample_id)
    parts, completions = await off_loop(viewer.owner, shown.size_bytes, _opened, server, shown)
    origin = await _origin(server, viewer, shown)
    of, is_unnamed = shown.of, shown.of.directory is not None and shown.of.model_path is None
    draw = None if is_unnamed else Draw(of.base_model, of.model_path, shown.prompt, shown.params, shown.num_samples)
    values = {"shown": shown, "origin": origin, "parts": parts, "completions": completions, "draw": draw}
    return page(request, "sample.html", values)


@router.get("/{sample_id}/images/{number}")
async def show_image(sample_id: str, number: int, server: Server, viewer: Viewing) -> Response:
    """Return an image of a prompt, as it was sent."""
    image = _image(_require(server, viewer, sample_id), number)
    return Response(image.data, media_type=f"image/{image.format}")


@router.get("/{sample_id}/thumbnails/{number}")
async def show_thumbnail(sample_id: str, number: int, server: Server, viewer: Viewing) -> Response:
    """Return a small form of an image of a prompt."""
    image = _image(_require(server, viewer, sample_id), number)
    made = await thumbnail(viewer.owner, sample_id, number, image.data)
    if made is None:
        return Response(image.data, media_type=f"image/{image.format}")
    return Response(made, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})


def _image(shown: Shown, number: int) -> ImageChunk:
    """Return an image of a prompt. Raises UnknownSampler."""
    images = [chunk for chunk in shown.prompt.chunks if isinstance(chunk, ImageChunk)]
    if not 0 <= number < len(images):
        numbers = f"images 0 to {len(images) - 1}" if images else "no image"
        raise UnknownSampler(f"image {number}: the sample has {numbers}")
    return images[number]


def _require(server: Services, viewer: Viewer, sample_id: str) -> Shown:
    """Return the viewer's sample. Raises UnknownSampler, also for another owner's sample."""
    shown = server.gallery.get(viewer.owner, sample_id)
    if shown is None:
        raise UnknownSampler("this sample is no longer in memory")
    return shown


async def _step_of(server: Services, shown: Shown) -> int | None:
    """Return the steps of the run before the sample's weights were saved."""
    return shown.step if shown.step is not None else await server.weight_steps.step_of(shown.of)


async def _origin(server: Services, viewer: Viewer, shown: Shown) -> Origin:
    """Return the place of the weights in training. Another owner's published weights show nothing of their run."""
    run_id = shown.of.run_id
    run = await server.runs.find(run_id) if run_id else None
    if run is None or run.owner != viewer.owner:
        return Origin("")
    step = await _step_of(server, shown)
    if step is None:
        return Origin(run_id)
    names = important_of(await server.client_metrics.names(run_id))
    name = next((name for name in names if "reward" in name.lower()), "")
    points = await server.client_metrics.points(run_id, [name], (step, step), 1)
    return Origin(run_id, step, name, points[name][0].value if points[name] else None)


async def samples_by_step(server: Services, owner: str, run_id: str) -> dict[int, list[Shown]]:
    """Return the samples of a run's weights by the step that the weights began, newest first."""
    found: dict[int, list[Shown]] = {}
    for shown in server.gallery.of_run(owner, run_id):
        if (step := await _step_of(server, shown)) is not None:
            found.setdefault(step, []).append(shown)
    return found


def sample_of_step(server: Services, shown: Shown, most_tokens: int) -> StepSample:
    """Return the end of a sample's prompt, and the beginning of its first continuation token by token."""
    base = server.models.served.get(shown.of.base_model)
    completion = completion_of(base, shown.sequences[0], most_tokens) if shown.sequences else None
    return StepSample(shown, _end_of_prompt(base, shown), completion, _num_images(shown))


def _preview(server: Services, shown: Shown, origin: Origin) -> Preview:
    """Return the end of the prompt and the beginning of the first continuation."""
    base = server.models.served.get(shown.of.base_model)
    first = parts_of(base, shown.sequences[0].tokens[:PREVIEW_TOKENS].tolist()) if shown.sequences else []
    return Preview(shown, origin, _end_of_prompt(base, shown), first, _num_images(shown))


def _end_of_prompt(base: BaseModel | None, shown: Shown) -> list[Part]:
    texts = [chunk for chunk in shown.prompt.chunks if isinstance(chunk, EncodedTextChunk)]
    return parts_of(base, texts[-1].tokens[-PREVIEW_TOKENS:].tolist()) if texts else []


def _num_images(shown: Shown) -> int:
    return sum(isinstance(chunk, ImageChunk) for chunk in shown.prompt.chunks)


def _opened(server: Services, shown: Shown) -> tuple[list[Part], list[Completion]]:
    base = server.models.served.get(shown.of.base_model)
    return prompt_parts(base, shown.prompt.chunks), [completion_of(base, sequence) for sequence in shown.sequences]
