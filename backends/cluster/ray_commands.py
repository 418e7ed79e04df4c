"""Ray's own processes on one machine, as `ray start` starts them. Imports no Ray."""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from backends.processes.launcher import Guarded
from backends.protocol import BackendFailed

NODE_LABEL = "tinker-node"
"""Label by which Ray knows a node's name in the cluster."""
_MODULE = "ray.scripts.scripts"
_OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: nothing large is put into it."""
_LAST_LINES = 5
_ENDING_S = 0.5


class RayEnded(BackendFailed):
    """Ray has ended by itself."""


def ray_environment(token_file: Path) -> dict[str, str]:
    """Return the variables of a process that talks to Ray, or is Ray's."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file.absolute()),
        "RAY_usage_stats_enabled": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # on a full machine it ends what it did not start
    }


@contextlib.asynccontextmanager
async def ray_running(arguments: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Guarded]:
    """Run `ray start` with arguments while the block runs. All that it starts stays in its process group."""
    folder = tempfile.mkdtemp(prefix="tinker-ray-")  # Ray's sockets are beneath it, so that its path must be short
    log = Path(folder) / "output.log"
    command = [
        *("/bin/sh", "-c", 'exec "$@" >"$0" 2>&1', str(log), sys.executable, "-m", _MODULE, "start", *arguments),
        *("--block", "--temp-dir", folder, "--disable-usage-stats", "--include-log-monitor", "false"),
        # Nothing is placed by Ray's counts, and for its cores it would start idle workers.
        *("--num-cpus", "0", "--num-gpus", "0", "--object-store-memory", str(_OBJECT_STORE_BYTES)),
    ]
    ray = await Guarded.start("Ray", command, {**os.environ, **env})
    try:
        yield ray
    except RayEnded as error:
        last = "; ".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        raise RayEnded(f"{error}; its last lines: {last}") from error
    finally:
        ray.abandon()  # it would take some seconds to end by itself, and holds nothing
        await asyncio.shield(ray.end(_ENDING_S))
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
