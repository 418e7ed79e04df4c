"""Ray's own processes on a machine, as `ray start` starts them. Imports no Ray."""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from tinker_server.backends.processes.guarded import Guarded
from tinker_server.backends.protocol import BackendFailed

NODE_LABEL = "tinker-node"
"""Label by which Ray knows a node's name in the cluster."""
_MODULE = "ray.scripts.scripts"
_OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: nothing large is put into it."""
_LAST_LINES = 5
_ENDING_S = 0.5
_ANSWER_S = 60.0
_SAID_CHARS = 300
_WITHOUT_TOKEN = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": ""}


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


async def require_guarded(address: str) -> None:
    """Raise BackendFailed unless there is a Ray cluster at an address, of this version, that admits us by a token, and
    nobody without a token."""
    code, said = await _run_command(["health-check", "--address", address], {})
    if code != 0:
        hint = ""
        if "AuthenticationError" in said:
            hint = ": RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN must name its token"
        raise BackendFailed(f"the Ray cluster at {address} does not take this machine{hint}: {said[-_SAID_CHARS:]}")
    code, _ = await _run_command(["health-check", "--address", address, "--skip-version-check"], _WITHOUT_TOKEN)
    if code == 0:
        raise BackendFailed(
            f"the Ray cluster at {address} takes everybody: start it with RAY_AUTH_MODE=token on every machine, and a"
            " token (ray get-auth-token --generate)"
        )


async def _run_command(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[int | None, str]:
    """Run a command of Ray; return its exit code and the last line that it has said."""
    with tempfile.NamedTemporaryFile("r", prefix="tinker-ray-", errors="replace") as output:
        ray = await Guarded.start("Ray", _ray_command(output.name, arguments), {**os.environ, **env})
        try:
            async with asyncio.timeout(_ANSWER_S):
                code = await ray.wait()
        except TimeoutError:
            return 1, f"no answer in {_ANSWER_S:.0f} s"
        finally:
            await asyncio.shield(ray.end(0))
        return code, next(filter(None, (line.strip() for line in reversed(output.readlines()))), "")


def _ray_command(log: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a command of Ray that writes into a file."""
    return ["/bin/sh", "-c", 'exec "$@" >"$0" 2>&1', log, sys.executable, "-m", _MODULE, *arguments]


@contextlib.asynccontextmanager
async def ray_running(arguments: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Guarded]:
    """Run `ray start` with arguments while the block runs. All that it starts stays in its process group."""
    folder = tempfile.mkdtemp(prefix="tinker-ray-")  # Ray's sockets are beneath it, so that its path must be short
    log = Path(folder) / "output.log"
    opened = Path(folder) / "r"  # Ray lets everybody write into its directory and the sockets' there
    command = [
        *_ray_command(str(log), ["start", *arguments]),
        *("--block", "--temp-dir", str(opened), "--disable-usage-stats", "--include-log-monitor", "false"),
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
