"""The latest samples, token by token, with the run, step and reward that they belong to."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk
from tinker_server.api_schemas.sampling import SampledSequence
from tinker_server.backends.protocol import BaseModel
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.curves import important_of
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.thumbnails import thumbnail
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.errors import UnknownSampler
from tinker_server.observability.recent_samples import Drawn, Shown
from tinker_server.offload import off_loop
from tinker_server.operations.recording import is_optim_step
from tinker_server.store.checkpoints import parse_path
from tinker_server.store.samplers import run_of_weights
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/samples", route_class=PageRoute, include_in_schema=False)
LIKELY = (-0.05, -0.2, -0.7, -1.6, -3.0, -5.0)
"""Bounds in nats between the colours of tokens by log probability."""
PREVIEW_TOKENS = 60
NO_CLIENT = "none"
"""Stands in the filter for samples of base models and of chats, which have no sampling session."""
THUMBNAILS = 4
"""Thumbnails of a sample in the list."""


@dataclass(frozen=True)
class Token:
    """A sampled token as it is shown."""

    text: str
    token_id: int
    logprob: float
    level: int
    """Colour by log probability; 0 is the likeliest."""
    is_special: bool


@dataclass(frozen=True)
class Part:
    """A piece of a prompt: text, of special tokens or others, or the number of an image."""

    text: str
    image: int | None = None
    is_special: bool = False


@dataclass(frozen=True)
class Completion:
    """One continuation."""

    tokens: list[Token]
    stop_reason: str
    total_logprob: float


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


@router.get("")
async def show_samples(request: Request, server: Server, viewer: Viewing, client: str = "", run: str = "") -> Response:
    """Show the list; `client` selects the samples of one sampling session, or those of none, and `run` those of a
    run's weights."""
    found = server.gallery.of(viewer.owner)
    clients = list(dict.fromkeys(one.sampler_id or NO_CLIENT for one in found))
    runs = list(dict.fromkeys(filter(None, (_run_of(one.of) for one in found))))
    shown = [one for one in found if not client or (one.sampler_id or NO_CLIENT) == client]
    shown = [one for one in shown if not run or _run_of(one.of) == run]
    origins = {of: await _origin(server, viewer, of) for of in {one.of for one in shown}}
    previews = [await off_loop(viewer.owner, one.size_bytes, _preview, server, one, origins[one.of]) for one in shown]
    filters = {"clients": clients, "client": client, "no_client": NO_CLIENT, "runs": runs, "run": run}
    values = {"previews": previews, "most_images": THUMBNAILS, "per_owner": server.gallery.per_owner}
    return page(request, "samples.html", {**values, **filters, "on_disk": server.settings.samples_disk_bytes})


@router.get("/{sample_id}")
async def show_sample(request: Request, sample_id: str, server: Server, viewer: Viewing) -> Response:
    """Show one prompt and its continuations."""
    shown = _require(server, viewer, sample_id)
    parts, completions = await off_loop(viewer.owner, shown.size_bytes, _opened, server, shown)
    origin = await _origin(server, viewer, shown.of)
    values = {"shown": shown, "origin": origin, "parts": parts, "completions": completions}
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


def _run_of(of: Drawn) -> str:
    return run_of_weights(of.model_path, of.directory)


async def _origin(server: Services, viewer: Viewer, of: Drawn) -> Origin:
    """Return the place of the weights in training. Another owner's published weights show nothing of their run."""
    run_id = _run_of(of)
    run = await server.runs.find(run_id) if run_id else None
    if run is None or run.owner != viewer.owner:
        return Origin("")
    seq_id = await _saved_as(server, of)
    last = None if seq_id is None else await server.steps.last_before(run_id, seq_id)
    if last is None:
        return Origin(run_id)
    step = last.step + is_optim_step(last)
    name = next((one for one in important_of(await server.client_metrics.names(run_id)) if "reward" in one.lower()), "")
    points = await server.client_metrics.points(run_id, [name], (step, step), 1)
    return Origin(run_id, step, name, points[name][0].value if points[name] else None)


async def _saved_as(server: Services, of: Drawn) -> int | None:
    """Return the number of the operation that saved the weights; None if it is not known, or they were saved again."""
    if of.model_path is not None:
        checkpoint = await server.checkpoints.find(parse_path(of.model_path))
        return checkpoint.saved_as if checkpoint is not None and checkpoint.directory == of.directory else None
    number = (of.directory or "").rpartition("/")[2].partition("~")[0]
    return int(number) if number.isdecimal() else None


def _preview(server: Services, shown: Shown, origin: Origin) -> Preview:
    """Return the end of the prompt and the beginning of the first continuation."""
    base = server.models.served.get(shown.of.base_model)
    texts = [chunk for chunk in shown.prompt.chunks if isinstance(chunk, EncodedTextChunk)]
    prompt = _parts(base, texts[-1].tokens[-PREVIEW_TOKENS:].tolist()) if texts else []
    first = _parts(base, shown.sequences[0].tokens[:PREVIEW_TOKENS].tolist()) if shown.sequences else []
    return Preview(shown, origin, prompt, first, sum(isinstance(chunk, ImageChunk) for chunk in shown.prompt.chunks))


def _opened(server: Services, shown: Shown) -> tuple[list[Part], list[Completion]]:
    base = server.models.served.get(shown.of.base_model)
    parts: list[Part] = []
    num_images = 0
    for chunk in shown.prompt.chunks:
        if isinstance(chunk, EncodedTextChunk):
            parts += _parts(base, chunk.tokens.tolist())
        elif isinstance(chunk, ImageChunk):
            parts.append(Part("", num_images))
            num_images += 1
    return parts, [_completion(base, sequence) for sequence in shown.sequences]


def _texts(base: BaseModel | None, token_ids: list[int]) -> tuple[list[str], frozenset[int]]:
    """Return the text of each token, and the special ids. A base model that is no longer served has ids alone."""
    if base is None:
        return [f"<{token_id}>" for token_id in token_ids], frozenset()
    return base.token_texts(token_ids), base.special_ids()


def _parts(base: BaseModel | None, token_ids: list[int]) -> list[Part]:
    """Return the text in pieces, each of special tokens or of others."""
    texts, special = _texts(base, token_ids)
    known = zip(texts, (token_id in special for token_id in token_ids), strict=True)
    return [
        Part("".join(text for text, _ in pieces), is_special=is_special)
        for is_special, pieces in itertools.groupby(known, key=lambda one: one[1])
    ]


def _completion(base: BaseModel | None, sequence: SampledSequence) -> Completion:
    token_ids: Sequence[int] = sequence.tokens.tolist()
    logprobs: Sequence[float] = sequence.logprobs.tolist()
    texts, special = _texts(base, list(token_ids))
    tokens = [
        Token(text, token_id, logprob, sum(logprob < bound for bound in LIKELY), token_id in special)
        for text, token_id, logprob in zip(texts, token_ids, logprobs, strict=True)
    ]
    return Completion(tokens, sequence.stop_reason, sum(logprobs))
