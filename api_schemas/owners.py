"""Types of an administrator's routes: all owners, their runs and their keys (docs/operating.md, Administrators)."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from tinker_server.api_schemas.base import NOTED, Request, Response
from tinker_server.api_schemas.fields import BaseModelName, ModelId
from tinker_server.api_schemas.listing import Cursor

Owner = Annotated[str, Field(description="An owner, which is the name of API keys.")]


class Tokens(Response):
    """Tokens that were computed for an owner since `used_since`."""

    training: int
    """Tokens trained on."""
    prefill: int
    """Prompt tokens computed for samples and chats; those of the prefix cache are left out."""
    sampled: int
    """Tokens sampled."""


class OwnerSummary(Response):
    """What one owner has and uses."""

    owner: Owner
    keys: int
    """Number of its keys, expired ones too."""
    runs_in_memory: int
    """Runs whose model the trainer holds."""
    runs_on_disk: int
    """Runs whose model is on disk until its next operation."""
    memory_bytes: int
    """Device memory of each trainer rank that its models take."""
    disk_bytes: int
    """Bytes of its saved weights, snapshots and archives."""
    operations_running: int
    """Its training operations and samples that run."""
    operations_waiting: int
    """Its training operations that wait."""
    tokens: Tokens
    """Tokens since `used_since`."""


class OwnersResponse(Response):
    """All owners that have a key, a run or usage."""

    owners: list[OwnerSummary]
    """An entry for each, by name."""
    used_since: AwareDatetime
    """Start of the hour from which tokens are counted."""


class OwnedRun(Response):
    """A run of any owner."""

    run_id: ModelId
    name: str
    """The name that its owner gave it; empty if there is none."""
    owner: Owner
    base_model: BaseModelName
    lora_rank: int | None
    """Rank of the adapter; null for a whole model."""
    place: Literal["memory", "disk", "ended"]
    """`memory`: the trainer holds its model; `disk`: until its next operation; `ended`: only checkpoints are left."""
    memory_bytes: int
    """Device memory of each trainer rank that its model takes."""
    operations_running: int
    """Its operations that run."""
    operations_waiting: int
    """Its operations that wait."""
    steps: int
    """Its optim_steps."""
    tokens: int
    """Tokens that were computed for it in training."""
    created_at: AwareDatetime
    """Time at which it was created."""
    last_step_at: AwareDatetime | None
    """Time of its last forward_backward or optim_step; null: there is none, or it is no longer recorded."""


class OwnedRunsResponse(Response):
    """A page of the runs of all owners, or of one."""

    runs: list[OwnedRun]
    """The page, newest first."""
    cursor: Cursor
    """Position of the page in the list."""


class UnloadRunRequest(Request):
    """Move a run's model from memory to disk. Its next operation brings it back."""

    run_id: ModelId


class StopRunRequest(Request):
    """Stop a run with everything else of its session."""

    run_id: ModelId
    reason: Annotated[str, NOTED] = ""
    """Reason, which the owner's client shows."""


class StopRunResponse(Response):
    """All that was stopped."""

    run_ids: list[ModelId]
    """Runs of the session, whose models are in memory and on disk no more. Their checkpoints stay."""
    cancelled: int
    """Operations and samples that waited or, if samples, ran; they fail."""


class KeyInfo(Response):
    """A key, which is known by its hash alone."""

    owner: Owner
    key_id: str
    """The beginning of its hash, by which `tinker-server keys remove` names it."""
    scope: Literal["all", "sample", "metrics"]
    """Requests that it may be used for."""
    is_admin: bool
    """Whether it has the role of an administrator."""
    created_at: AwareDatetime | None
    """Time at which it was made; null: not recorded."""
    expires_at: AwareDatetime | None
    """Time from which it is unknown; null: never."""
    used_at: AwareDatetime | None
    """Time of its last use; null: never, as far as is known."""


class KeysResponse(Response):
    """All keys of the server."""

    keys: list[KeyInfo]
    """In the order of their file."""
