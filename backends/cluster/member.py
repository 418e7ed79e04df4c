"""An actor on each node of a Ray cluster that was there before the server: it does there what `join` does elsewhere.
Imports no Ray."""

import asyncio
from dataclasses import replace

from backends.cluster.handshake import connect
from backends.cluster.offer import Invitation
from backends.cluster.versions import versions
from backends.files import make_directory, write_private
from backends.processes.launcher import parents_environment


class Member:
    """Has one node belong to the server. It reserves the node's GPUs while it lives."""

    def __init__(self, invitation: Invitation, name: str, node: str) -> None:
        self._invitation, self._name, self._node = invitation, name, node

    async def belong(self) -> bool:
        """Belong until the connection ends; return whether this machine was told to leave. Raises BackendFailed."""
        from backends.cluster.join import offer_of, told_to_leave  # slow to import: brings transformers

        asked = self._invitation
        data_dir = asked.data_dir / self._name
        token_file = data_dir / "cluster-token"
        await asyncio.to_thread(make_directory, data_dir, 0o700)
        await asyncio.to_thread(write_private, token_file, asked.token.encode())
        offer = await asyncio.to_thread(offer_of, self._name, asked.server, token_file, data_dir, asked.models)
        offer = replace(offer, ray_label=self._node, environment=parents_environment())
        connection = await connect(asked.server, asked.token, ask="node", versions=versions(), offer=offer.as_json())
        try:
            return await told_to_leave(connection)
        finally:
            connection.close()
