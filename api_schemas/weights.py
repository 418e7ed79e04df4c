"""Types for saving and loading weights (docs/protocol.md, Saved weights)."""

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from tinker_server.api_schemas.base import FirstError, Request, Response
from tinker_server.api_schemas.fields import (
    AccessToken,
    CheckpointName,
    ClientMetadata,
    Integer,
    ModelId,
    Overwrite,
    SeqId,
    TinkerPathText,
    TtlSeconds,
)
from tinker_server.api_schemas.training import OptimizerConfig

Kind = Literal["weights", "sampler_weights", "external_weights"]
_PATH = re.compile(r"tinker://(?P<run>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class TinkerPath(NamedTuple):
    """`tinker://<training run>/<kind>/<name>`, the public name of saved weights."""

    run_id: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, path: str) -> "TinkerPath":
        """Parse a path. Raises ValueError, naming the grammar, if it is malformed."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise ValueError(f"{path!r} is not tinker://<run>/<weights, sampler_weights or external_weights>/<name>")
        return cls(match["run"], match["kind"], match["name"])  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


def check_name(name: str) -> str:
    """Return a checkpoint's name if it can name a directory. Raises ValueError if not."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"checkpoint name {name!r}: use 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return name


class SaveWeightsRequest(Request):
    """Save a training checkpoint: adapter, optimizer, step count."""

    type: Literal["save_weights"] = "save_weights"
    model_id: ModelId
    seq_id: SeqId
    path: CheckpointName
    ttl_seconds: TtlSeconds = None
    overwrite: Overwrite = False
    user_metadata: ClientMetadata = None


class SaveWeightsResponse(Response):
    """Result of save_weights."""

    type: Literal["save_weights"] = "save_weights"
    path: TinkerPathText


class SaveWeightsForSamplerRequest(Request):
    """Save weights to sample from, under a name or, without a path, into a new sampling session."""

    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"
    model_id: ModelId
    seq_id: SeqId
    path: str | None = None
    """Name of the saved weights within their training run."""
    sampling_session_seq_id: Integer | None = Field(default=None, ge=0)
    """Without a path: the client's number of the new sampling session in its session."""
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """Whether the sampling session keeps these weights (snapshot) or follows later ones (inflight)."""
    ttl_seconds: TtlSeconds = None
    overwrite: Overwrite = False
    user_metadata: ClientMetadata = None


class SaveWeightsForSamplerResponse(Response):
    """Result of save_weights_for_sampler."""

    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"
    path: str | None = None
    """tinker:// path of the weights, if they were saved under a name."""
    sampling_session_id: str | None = None
    """Sampling session of the weights, if they were saved without a name."""


class SaveWeightsExternalRequest(Request):
    """Save the adapter in formats of other programs, for download. Unless encrypted, it can be loaded too."""

    type: Literal["save_weights_external"] = "save_weights_external"
    model_id: ModelId
    seq_id: SeqId
    path: CheckpointName
    ttl_seconds: TtlSeconds = None
    overwrite: Overwrite = False
    user_metadata: ClientMetadata = None
    age_encryption_recipients: Annotated[list[str], FirstError(), Field(max_length=64)] | None = None
    """age or SSH public keys that every file is encrypted to; the files' names then end in `.age`."""


class SaveWeightsExternalResponse(Response):
    """Result of save_weights_external."""

    type: Literal["save_weights_external"] = "save_weights_external"
    path: TinkerPathText
    size_bytes: int
    """Total size of the files."""


class LoadWeightsRequest(Request):
    """Create a model from a checkpoint (session_id, model_seq_id), or load one into a model (model_id, seq_id)."""

    type: Literal["load_weights"] = "load_weights"
    path: TinkerPathText
    optimizer: bool = False
    """Whether to restore the optimizer's state and step count too."""
    session_id: str | None = None
    """To create a model: its session."""
    model_seq_id: Integer | None = Field(default=None, ge=0)
    """To create a model: its number in the session, chosen by the client."""
    base_model: str | None = None
    """Public name of the base model, which must be the checkpoint's."""
    user_metadata: ClientMetadata = None
    optimizer_config: OptimizerConfig | None = None
    """The optimizer. Models here have adamw."""
    weights_access_token: AccessToken = None
    model_id: str | None = None
    """To load into a model: its id."""
    seq_id: Integer | None = None
    """To load into a model: the operation's sequence number."""


class LoadWeightsResponse(Response):
    """Result of load_weights."""

    type: Literal["load_weights"] = "load_weights"
    path: TinkerPathText
    model_id: ModelId
