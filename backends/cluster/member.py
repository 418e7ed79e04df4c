"""Ray actor on each node of an existing Ray cluster: the counterpart of `tinker-server join`.
Imports no Ray."""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tinker_server.backends.cluster.handshake import connect
from tinker_server.backends.cluster.offer import Invitation
from tinker_server.backends.cluster.versions import versions
from tinker_server.backends.files import make_private_directory, write_private
from tinker_server.backends.processes.launcher import parents_environment


class Member:
    """Has one node belong to the server. It reserves the node's GPUs while it lives."""

    def __init__(self, invitation: Invitation, name: str, node: str) -> None:
        self._invitation, self._name, self._node = invitation, name, node

    async def belong(self) -> bool:
        """Belong until the connection ends; return whether this machine was asked to leave. Raises BackendFailed."""
        from tinker_server.backends.cluster.join import await_leave, offer_of  # slow to import: brings transformers

        asked = self._invitation
        data_dir = asked.data_dir / self._name
        token_file = await asyncio.to_thread(_write_token, data_dir, asked.token)
        offer = await offer_of(self._name, asked.server, token_file, data_dir, _sources(asked.models))
        offer = replace(offer, ray_label=self._node, environment=parents_environment())
        with tempfile.TemporaryDirectory(prefix="tinker-base-", ignore_cleanup_errors=True) as base_dir:
            said = replace(offer, base_dir=base_dir).as_json()
            connection = await connect(asked.server, asked.token, ask="node", versions=versions(), offer=said)
            try:
                return await await_leave(connection)
            finally:
                connection.close()


def _write_token(data_dir: Path, token: str) -> Path:
    make_private_directory(data_dir)
    path = data_dir / "cluster-token"
    write_private(path, token.encode())
    return path


def _sources(models: Mapping[str, str]) -> dict[str, str | None]:
    """Return the directories that this node has too, as where nodes share a file system; None for the others."""
    return {name: path if Path(path).is_dir() else None for name, path in models.items()}
