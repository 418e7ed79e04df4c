"""Parameters of paths, queries and headers that several routes take, each described once."""

from typing import Annotated

from fastapi import Header, Path, Query

SessionIdInPath = Annotated[str, Path(description="A session, which is one client.")]
RunIdInPath = Annotated[str, Path(description="A training run, which is named like its model.")]
ProjectInQuery = Annotated[str | None, Query(description="Only what belongs to this project.")]
LinkEnd = Annotated[int, Query(description="When the link ends, in Unix seconds.")]
LinkSignature = Annotated[str, Query(description="Signature of the link.")]
IdempotencyKey = Annotated[
    str | None, Header(alias="x-idempotency-key", description="A retry has the same one, and gets the first answer.")
]
