"""A real server in a process of its own, as a user starts it."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import tinker
import tinker.types as types

from tests.factories import present

MODEL = "tests/tiny-vl"
KEY = "tml-test"
CHILDREN = {
    "trainer": "tinker_server.backends.trainer.process",
    "sampler": "tinker_server.backends.sampler.engine.process",
}
"""The modules that child processes run."""


def runs(process: psutil.Process, module: str) -> bool:
    """Return whether it is a process of Python that runs a module, or a fork that has taken that title."""
    return " ".join(process.cmdline()).split()[1:3] == ["-m", module]


def variables_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; of a fork, whose title stands in its place, that of its parent, which has
    all but the variables of `preloaded.LATE`."""
    is_fork = " " in process.cmdline()[0]  # the whole title
    above = process.parent() if is_fork else process
    assert above is not None
    return above.environ()


RUNNING: set["Server"] = set()
"""Started, and neither stopped nor killed yet."""


class Server:
    """`tinker-server serve` on a free port."""

    patience_s = 400
    """Seconds in which it has to start."""

    def __init__(
        self,
        data_dir: Path,
        models: Mapping[str, Path],
        *arguments: str,
        checkout: Path | None = None,
        program: Sequence[str] = ("-m", "tinker_server"),
        **settings: Any,
    ) -> None:
        """`checkout`: of the server's source, another one than this. `program`: Python's arguments to run it."""
        self._checkout = checkout
        self._environment = {f"TINKER_SERVER_{name.upper()}": str(value) for name, value in settings.items()}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, *program, "serve", "--port", str(self.port)]
        self._command += ["--data-dir", str(data_dir), *arguments]
        for name, directory in models.items():
            self._command += ["--model", f"{name}={directory}"]
        self.log = data_dir.with_suffix(".log")

    def start(self) -> "Server":
        """Returns once the server has said its URL."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._checkout,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **self._environment},
            )
        RUNNING.add(self)
        timer = threading.Timer(self.patience_s, self.process.kill)
        timer.start()
        line = present(self.process.stdout).readline()
        timer.cancel()
        assert re.search(re.escape(self.base_url), line), f"no URL but {line!r}; log:\n{self.log.read_text()[-12000:]}"
        return self

    def stop(self, by: signal.Signals = signal.SIGINT) -> int:
        """Ctrl-C, or another signal; returns the exit code."""
        self.process.send_signal(by)
        code = self.process.wait(60)
        present(self.process.stdout).close()
        RUNNING.discard(self)
        return code

    def kill(self) -> None:
        """A crash."""
        self.process.kill()
        self.process.wait()
        present(self.process.stdout).close()
        RUNNING.discard(self)

    def client(self) -> tinker.ServiceClient:
        """An SDK client of its own session."""
        return tinker.ServiceClient(base_url=self.base_url, api_key=KEY)


def sdk_input(model_input: Any) -> types.ModelInput:
    """Our ModelInput as the SDK's."""
    chunks: list[Any] = []
    for chunk in model_input.chunks:
        if chunk.type == "encoded_text":
            chunks.append(types.EncodedTextChunk(tokens=chunk.tokens.tolist()))
        else:
            chunks.append(types.ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=chunk.expected_tokens))
    return types.ModelInput(chunks=chunks)


def sdk_datum(datum: Any) -> types.Datum:
    """Our Datum as the SDK's."""
    return types.Datum(
        model_input=sdk_input(datum.model_input),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in datum.loss_fn_inputs.items()},
    )
