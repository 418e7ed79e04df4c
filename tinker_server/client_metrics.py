"""A training loop's own metrics, sent to its run's page. It is for clients, and needs httpx alone."""

import math
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

import httpx

_TIMEOUT_S = 30.0
_PAUSE_S = 2.0
_AWAY = frozenset({429, 502, 503, 504})
"""Statuses of a server, or of its proxy, that answers later."""


class _HasModelId(Protocol):
    """The SDK's TrainingClient, as far as it is needed here."""

    model_id: str


class Metrics:
    """Sends metrics of a run."""

    def __init__(
        self,
        run: _HasModelId | str,
        base_url: str | None = None,
        api_key: str | None = None,
        patience_s: float = 600.0,
    ) -> None:
        """`run` is a TrainingClient or the run's id. Address and key are otherwise TINKER_BASE_URL and TINKER_API_KEY.

        While the server is away, `log` waits for it, `patience_s` at most.
        """
        self.run_id = run if isinstance(run, str) else run.model_id
        url, key = base_url or os.environ.get("TINKER_BASE_URL"), api_key or os.environ.get("TINKER_API_KEY")
        if not url or not key:
            missing = "base_url" if not url else "api_key"
            raise ValueError(f"{missing}: give it, or set TINKER_BASE_URL and TINKER_API_KEY")
        self._http = httpx.Client(base_url=url.rstrip("/"), headers={"X-API-Key": key}, timeout=_TIMEOUT_S)
        self._patience_s = patience_s
        self._next_step = 0

    def log(self, metrics: Mapping[str, float] | None = None, /, *, step: int | None = None, **named: float) -> None:
        """Send metrics of a step: `log(step=3, reward=0.5)`, or `log({"test/accuracy": 0.5}, step=3)`.

        Without `step` it is the step after the last. Raises ValueError for a value that is not finite and for what the
        server refuses, and TimeoutError.
        """
        values = {name: _finite(name, value) for name, value in {**(metrics or {}), **named}.items()}
        at = self._next_step if step is None else step
        self._send({"step": at, "metrics": values})
        self._next_step = at + 1

    def close(self) -> None:
        """Close the connection. Every `log` has been answered already."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, body: dict[str, object]) -> None:
        ends_at = time.monotonic() + self._patience_s
        while (problem := self._attempt(body)) is not None:
            if time.monotonic() + _PAUSE_S > ends_at:
                raise TimeoutError(f"metrics of {self.run_id} were not taken within {self._patience_s:g} s: {problem}")
            time.sleep(_PAUSE_S)

    def _attempt(self, body: dict[str, object]) -> str | None:
        """Send metrics, and return why the server does not answer at present; None once it has stored them."""
        try:
            answer = self._http.post(f"/api/v1/training_runs/{self.run_id}/metrics", json=body)
        except httpx.TransportError as error:
            return repr(error)
        if answer.status_code in _AWAY:
            return f"status {answer.status_code}"
        if answer.is_error:
            raise ValueError(f"metrics of {self.run_id}: refused with status {answer.status_code}: {answer.text}")
        return None


def _finite(name: str, value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: {value} is not a finite number")
    return number
