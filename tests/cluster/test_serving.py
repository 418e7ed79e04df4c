"""A server with other machines, as its operator sees it."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.machines import Machine, free_port, until
from tests.servers import KEY, MODEL, Server

pytestmark = pytest.mark.slow


def commands() -> list[str]:
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def nodes(server: Server) -> dict[str, float]:
    text = httpx.get(f"{server.base_url}/metrics", headers={"x-api-key": KEY}).text
    lines = [line for line in text.splitlines() if line.startswith("tinker_node_up{")]
    return {line.partition('node="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_the_operator_sees_the_machines_and_the_token_is_nowhere(tiny_vl: Path, tmp_path: Path) -> None:
    port, data = free_port(), tmp_path / "data"
    arguments = ["--cluster", "--cluster-address", "127.0.0.1", "--cluster-port", str(port)]
    server = await asyncio.to_thread(Server(data, {MODEL: tiny_vl}, *arguments).start)
    token_file = data / "cluster-token"
    line = f"join with: tinker-server join 127.0.0.1:{port} --token-file FILE, a copy of {token_file}"
    assert line in server.log.read_text()
    machine = await Machine(f"127.0.0.1:{port}", token_file, "a").start()
    await until(lambda: nodes(server) == {"a": 1})
    await until(lambda: sum("tinker-ray-" in command and "raylet " in command for command in commands()) == 2)
    command = [sys.executable, "-m", "tinker_server", "status", "--url", server.base_url]
    status = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    assert re.search(r"machine a at 127\.0\.0\.1 .* alive", status.stdout)
    token = token_file.read_text()
    assert len(token) == 64 and not [command for command in commands() if token in command]
    code, said = await machine.stop()
    assert code == 130 and token not in said + server.log.read_text()
    assert nodes(server) == {}
    assert await asyncio.to_thread(server.stop) == 0
    assert not [command for command in commands() if "tinker-ray-" in command]
