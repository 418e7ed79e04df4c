"""The latest samples, token by token."""

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from api_schemas.inputs import EncodedTextChunk, ImageChunk
from api_schemas.sampling import SampledSequence
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.errors import UnknownSampler
from tinker_server.observability.recent_samples import Shown
from tinker_server.offload import off_loop
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/samples", route_class=PageRoute, include_in_schema=False)
LIKELY = (-0.05, -0.2, -0.7, -1.6, -3.0, -5.0)
"""Bounds in nats between the colours of tokens by log probability."""
PREVIEW_TOKENS = 60
NO_CLIENT = "none"
"""Stands in the filter for samples of base models and of chats, which have no sampling session."""


@dataclass(frozen=True)
class Token:
    """A sampled token as it is shown."""

    text: str
    token_id: int
    logprob: float
    level: int
    """Colour by log probability; 0 is the likeliest."""


@dataclass(frozen=True)
class Part:
    """A chunk of a prompt: text, or the number of an image."""

    text: str
    image: int | None = None


@dataclass(frozen=True)
class Completion:
    """One continuation."""

    tokens: list[Token]
    stop_reason: str
    total_logprob: float


@router.get("")
async def show_samples(request: Request, server: Server, viewer: Viewing, client: str = "") -> Response:
    """Show the list; `client` selects the samples of one sampling session, or those of none."""
    found = server.gallery.of(viewer.owner)
    clients = list(dict.fromkeys(one.sampler_id or NO_CLIENT for one in found))
    shown = [one for one in found if not client or (one.sampler_id or NO_CLIENT) == client]
    previews = [(one, *(await _preview(server, one))) for one in shown]
    values = {"previews": previews, "clients": clients, "client": client, "no_client": NO_CLIENT}
    values["per_owner"] = server.gallery.per_owner
    return page(request, "samples.html", values)


@router.get("/{sample_id}")
async def show_sample(request: Request, sample_id: str, server: Server, viewer: Viewing) -> Response:
    """Show one prompt and its continuations."""
    shown = _require(server, viewer, sample_id)
    parts, completions = await off_loop(shown.size_bytes, _opened, server, shown)
    return page(request, "sample.html", {"shown": shown, "parts": parts, "completions": completions})


@router.get("/{sample_id}/images/{number}")
async def show_image(sample_id: str, number: int, server: Server, viewer: Viewing) -> Response:
    """Return an image of a prompt, as it was sent."""
    images = [chunk for chunk in _require(server, viewer, sample_id).prompt.chunks if isinstance(chunk, ImageChunk)]
    if not 0 <= number < len(images):
        raise UnknownSampler(f"the sample has {len(images)} images")
    return Response(images[number].data, media_type=f"image/{images[number].format}")


def _require(server: Services, viewer: Viewer, sample_id: str) -> Shown:
    """Return the viewer's sample. Raises UnknownSampler, also for another owner's sample."""
    shown = server.gallery.get(viewer.owner, sample_id)
    if shown is None:
        raise UnknownSampler("this sample is no longer in memory")
    return shown


async def _preview(server: Services, shown: Shown) -> tuple[str, str]:
    return await off_loop(shown.size_bytes, _begin_and_end, server, shown)


def _begin_and_end(server: Services, shown: Shown) -> tuple[str, str]:
    """Return the end of the prompt and the beginning of the first continuation."""
    base = server.models.served[shown.base_model]
    texts = [chunk for chunk in shown.prompt.chunks if isinstance(chunk, EncodedTextChunk)]
    prompt = base.token_texts(texts[-1].tokens[-PREVIEW_TOKENS:].tolist()) if texts else []
    first = base.token_texts(shown.sequences[0].tokens[:PREVIEW_TOKENS].tolist()) if shown.sequences else []
    return "".join(prompt), "".join(first)


def _opened(server: Services, shown: Shown) -> tuple[list[Part], list[Completion]]:
    base = server.models.served[shown.base_model]
    parts, num_images = [], 0
    for chunk in shown.prompt.chunks:
        if isinstance(chunk, EncodedTextChunk):
            parts.append(Part("".join(base.token_texts(chunk.tokens.tolist()))))
        elif isinstance(chunk, ImageChunk):
            parts.append(Part("", num_images))
            num_images += 1
    return parts, [_completion(sequence, base.token_texts(sequence.tokens.tolist())) for sequence in shown.sequences]


def _completion(sequence: SampledSequence, texts: list[str]) -> Completion:
    logprobs = sequence.logprobs.tolist()
    tokens = [
        Token(text, token_id, logprob, sum(logprob < bound for bound in LIKELY))
        for text, token_id, logprob in zip(texts, sequence.tokens.tolist(), logprobs, strict=True)
    ]
    return Completion(tokens, sequence.stop_reason, sum(logprobs))
