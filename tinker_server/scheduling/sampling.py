"""Drawing samples from a base model or saved weights."""

from api_schemas.sampling import SampleRequest, SampleResponse
from backends.protocol import SamplingTask
from tinker_server.errors import UnknownCheckpoint
from tinker_server.models import Models
from tinker_server.scheduling.counting import count_sample
from tinker_server.store.directories import Storage
from tinker_server.store.runs import CheckpointStore
from tinker_server.store.sessions import SamplerStore
from tinker_server.store.usage import UsageStore
from tinker_server.weights.lookup import find_weights


class Sampling:
    """On the samplers. Raises InvalidInput, BackendFailed or a TinkerServerError; texts are for the user."""

    def __init__(
        self,
        models: Models,
        checkpoints: CheckpointStore,
        samplers: SamplerStore,
        storage: Storage,
        usage: UsageStore,
    ) -> None:
        self._models = models
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._storage = storage
        self._usage = usage

    async def sample(self, request: SampleRequest, owner: str) -> SampleResponse:
        """As many continuations as the request asks for."""
        if request.sampling_session_id is None:
            session_id, model_path = None, request.model_path
            base_model, directory = await find_weights(
                self._models, self._checkpoints, request.base_model, request.model_path, owner
            )
        else:
            sampler = await self._samplers.get(request.sampling_session_id)
            session_id, base_model = sampler.session_id, sampler.base_model
            model_path, directory = sampler.model_path, sampler.directory
            self._samplers.note_use(sampler.sampling_session_id)
            if sampler.weights_deleted_at is not None:
                raise UnknownCheckpoint(
                    "the weights of the sampling session were deleted: they had no name, and were not used for long"
                )
        base = self._models.base(base_model)
        weights = None
        if directory is not None:
            if not self._storage.holds(directory):
                raise UnknownCheckpoint(f"{model_path or 'the weights of the sampling session'} were deleted")
            weights = self._storage.path(directory)
        response = await base.sampler.sample(SamplingTask.from_request(request, weights, owner))
        if session_id is not None:
            count_sample(self._usage, session_id, base_model, request, response)
        return response
