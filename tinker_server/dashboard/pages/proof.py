"""A run's proof sheet: what was trained on what, with what result, as one page and one signed JSON file."""

import hashlib
import time
from collections import Counter
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tinker_server.auth import proofs
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.curves import important_of
from tinker_server.dashboard.rendering import moment, page, short
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.operations.recording import is_optim_step
from tinker_server.release import release
from tinker_server.store.catalog import Page, RunRecord, Scope
from tinker_server.store.records import Step
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)
AT_ONCE, CHECKPOINTS = 2000, 200


@dataclass
class Trained:
    """What the recorded operations of a run add up to."""

    hashed: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    counts: Counter[str] = field(default_factory=Counter)
    """Of operations, steps, operations without a hash, and tokens."""
    first: int | None = None
    last: int | None = None
    last_at: float = 0.0
    rates: list[float] = field(default_factory=list)
    """Learning rate of the first and of the last step."""
    gaps: list[float] = field(default_factory=list)

    @property
    def data(self) -> dict[str, object]:
        """The hash of the bodies, with what it is of."""
        return {
            "sha256": self.hashed.hexdigest(),
            "of": "lines NUMBER:SHA256 of each accepted body of forward_backward and optim_step, in order",
            "operations": self.counts["operations"],
            "without_hash": self.counts["unhashed"],
            "first_number": self.first,
            "last_number": self.last,
            "tokens": self.counts["tokens"],
        }

    @property
    def gap(self) -> dict[str, float] | None:
        """The difference between the log probabilities of trainer and sampler; None if no batch had those."""
        gaps = self.gaps
        return {"mean": sum(gaps) / len(gaps), "largest": max(gaps), "batches": len(gaps)} if gaps else None

    def add(self, step: Step) -> None:
        """Add the next operation."""
        self.first, self.last = (step.seq_id if self.first is None else self.first), step.seq_id
        self.last_at = step.at
        self.counts["operations"] += 1
        self.counts["tokens"] += step.tokens
        self.counts["unhashed"] += step.digest is None
        self.hashed.update(f"{step.seq_id}:{step.digest or ''}\n".encode())
        if is_optim_step(step) and step.learning_rate is not None:
            self.counts["steps"] += 1
            self.rates = [*self.rates[:1], step.learning_rate]
        if step.sampler_gap is not None:
            self.gaps.append(step.sampler_gap)


@router.get("/proof")
async def show_proof(request: Request, run_id: str, server: Server, viewer: Viewing) -> Response:
    """Show the sheet."""
    return page(request, "proof.html", {"run_id": run_id, "sheet": await _make(server, run_id, viewer)})


@router.get("/proof.json")
async def download_proof(run_id: str, server: Server, viewer: Viewing) -> JSONResponse:
    """Download the sheet with its signature, which `tinker-server verify` checks."""
    signed = proofs.sign(server.settings.data_dir, await _make(server, run_id, viewer))
    name = f"{short(run_id).replace(':', '-')}-proof.json"
    return JSONResponse(signed, headers={"Content-Disposition": f'attachment; filename="{name}"'})


async def _make(server: Services, run_id: str, viewer: Viewer) -> dict[str, object]:
    now = time.time()
    record = await server.catalog.run(run_id, Scope(viewer.owner), now)
    trained = Trained()
    async for steps in server.steps.pages(run_id, AT_ONCE):
        for step in steps:
            trained.add(step)
    asked = Page(Scope(viewer.owner), CHECKPOINTS, 0)
    names = important_of(await server.client_metrics.names(run_id))
    evaluated = await server.client_metrics.newest(run_id, names)
    run, history = record.run, server.machine_history
    starts = await history.server_starts(run.created_at, trained.last_at)
    restarts = await history.trainer_restarts(run.base_model, run.created_at, trained.last_at)
    saved, _ = await server.catalog.checkpoints(asked, ["weights", "sampler_weights"], now, run_id)
    made_with = ("rank", "seed", "train_mlp", "train_attn", "train_unembed")
    settings = "".join(f", {name}={getattr(run.trainable, name)}" for name in made_with)
    reproduced_by = {"new_model": f'service.create_lora_training_client("{run.base_model}"{settings})'}
    return {
        "made_at": moment(now),
        "server": {"version": release().version, "commit": release().commit},
        "run": _describe(record),
        "data": trained.data,
        "reproduced_by": reproduced_by,
        "training": {
            "steps": trained.counts["steps"],
            "learning_rate_first_and_last": trained.rates,
            "server_started_meanwhile": [moment(at) for at in starts],
            "trainer_restarted_meanwhile": [moment(at) for at in restarts],
        },
        "trainer_sampler_gap_nats": trained.gap,
        "evaluations": {metric.name: {"step": metric.step, "value": metric.value} for metric in evaluated},
        "checkpoints": [
            {"path": weights.tinker_path, "bytes": weights.size_bytes, "saved_at": moment(weights.created_at)}
            for weights in saved
        ],
    }


def _describe(record: RunRecord) -> dict[str, object]:
    run = record.run
    return {
        "id": run.model_id,
        "title": record.title,
        "owner": run.owner,
        "created_at": moment(run.created_at),
        "base_model": run.base_model,
        "base_fingerprint": run.base_fingerprint,
        "trainable": run.trainable.model_dump(mode="json"),
        "optimizer": run.optimizer_config,
        "user_metadata": run.user_metadata,
        "computed_with": run.computed_with,
    }
