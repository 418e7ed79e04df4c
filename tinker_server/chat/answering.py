"""Chats on the samplers: finds the weights, bounds an owner's requests in flight, and counts usage."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from tinker_server.backends import tasks
from tinker_server.backends.protocol import BackendFailed, ChatTask, InvalidInput
from tinker_server.chat.images import files, with_data
from tinker_server.chat.requests import ChatRequest
from tinker_server.errors import BadField, ChatFailed, UnknownCheckpoint, failure
from tinker_server.image_addresses import ImageAddresses
from tinker_server.models.admission import Admission
from tinker_server.observability.gallery import Gallery
from tinker_server.observability.recent_samples import Drawn
from tinker_server.offload import off_loop
from tinker_server.store.records import NO_SESSION
from tinker_server.weights.lookup import FoundWeights, WeightStores, find_weights

SCHEME = "tinker://"


class Chats:
    """Answers the requests of the chat endpoints."""

    def __init__(self, stores: WeightStores, admission: Admission, gallery: Gallery) -> None:
        self._stores = stores
        self._admission = admission
        self._gallery = gallery

    async def find(self, name: str, owner: str) -> FoundWeights:
        """Find the weights of a `model`: a base model's name, a tinker:// path, or both as `base;path`.

        Raises BadRequest, UnknownBaseModel, UnknownCheckpoint, OtherBaseModel.
        """
        base_model, path = _names(name)
        return await find_weights(self._stores, base_model, path, owner)

    async def answer(self, request: ChatRequest, owner: str, addresses: ImageAddresses) -> AsyncGenerator[str, None]:
        """Yield the parts of the answer, in its vendor's form, as they arrive. Closing the generator stops the work.

        Raises what `find` does, BadField, Busy, InvalidInput, ChatFailed.
        """
        found = await self.find(request.model, owner)
        context = self._stores.bases.base(found.base_model).info.max_context_length
        if request.num_messages > context:  # converting thousands takes the engine's event loop, which all share
            raise BadField(f"messages: {request.num_messages} are more than a context of {context} tokens", "messages")
        weights = self._weights(found.directory, request.model)
        counts = (owner, request.num_sequences, request.size_bytes, 0)
        self._admission.samples.enter(*counts)
        try:
            read_bytes = await with_data(request.endpoint, request.body, addresses, owner)
            with self._admission.samples.count(owner, 0, read_bytes, 0):
                kept_bytes, count = self._gallery.chat_bytes, request.num_sequences
                fields = request.image_fields
                task = ChatTask(request.endpoint, request.body, weights, owner, kept_bytes, count, fields)
                image_bytes = await self._image_bytes(request, found.base_model, owner, read_bytes)
                with self._admission.samples.count(owner, 0, 0, image_bytes):
                    async for part in self._parts(task, found):
                        yield part
        finally:
            self._admission.samples.leave(*counts)

    async def _image_bytes(self, request: ChatRequest, base_model: str, owner: str, read_bytes: int) -> int:
        """Return the bytes of the pixels of a conversation's images; `read_bytes` of files were read by address."""
        if request.endpoint == "completions":
            return 0
        base = self._stores.bases.base(base_model)
        return await off_loop(owner, request.size_bytes + read_bytes, lambda: base.pixel_bytes(files(request.body)))

    async def _parts(self, task: ChatTask, found: FoundWeights) -> AsyncGenerator[str, None]:
        parts: asyncio.Queue[str | None] = asyncio.Queue()
        sampler = self._stores.bases.base(found.base_model).sampler
        try:
            async with tasks.running([sampler.chat(task, parts.put_nowait)]) as [work]:
                work.add_done_callback(lambda _: parts.put_nowait(None))
                while (part := await parts.get()) is not None:
                    yield part
                usage = await work
        except InvalidInput:
            raise
        except BackendFailed as error:
            raise ChatFailed(failure(error).error) from None
        used = (task.owner, NO_SESSION, found.base_model)
        self._stores.usage.count("prefill", *used, usage.prompt - usage.cached)
        self._stores.usage.count("cached_prefill", *used, usage.cached)
        self._stores.usage.count("sampled", *used, usage.sampled)
        of = Drawn(found.base_model, _names(task.body["model"])[1], found.directory)
        for drawn in usage.drawn:
            self._gallery.note(*drawn, task.owner, of)

    def _weights(self, directory: str | None, name: str) -> Path | None:
        if directory is not None and not self._stores.storage.holds(directory):
            raise UnknownCheckpoint(f"the weights of {name} were deleted")
        return None if directory is None else self._stores.storage.path(directory)


def _names(name: str) -> tuple[str | None, str | None]:
    """Split a `model` into its base model and its path."""
    base, _, path = name.partition(";")
    if base.startswith(SCHEME):
        base, path = "", name
    return base or None, path or None
