"""Data directories as older servers left them, and the numbers that these servers computed from them.

`python -m tests.e2e.old_directory CHECKOUT NAME` makes one with the server of a checkout and today's embedded model.
The numbers are of its weights: both are made again when these change. It fills a data directory, ends the server,
serves a copy again and records the numbers. 073f48b made `stopped`, whose server was stopped; ab350a7 made `killed`,
whose server was killed, so that it has a log. b6afec41 made `mixture`, of a mixture of experts that is in the directory
too: its server was the last whose models were all of the LoRA layout `own`, and knew no other.
"""

import base64
import contextlib
import json
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from sqlalchemy import JSON, Boolean, Connection, MetaData

from tests.factories import photo
from tests.models import make_tiny_of
from tests.servers import KEY, Server
from tinker_server.embedded import DIRECTORIES
from tinker_server.store.database import Database

DATA = Path(__file__).parents[1] / "data"
SCHEMA_OF_AB350A7 = "0009"
MODEL = "tinker-server/tiny-vl"
TOKENS = [41, 7, 300, 12, 99, 640, 5, 18]
ADAM = {"learning_rate": 0.01}
IMAGE, IMAGE_TOKENS = photo(56, 56), 25
SNAPSHOT_EVERY_S = 4.0


class Client:
    """The API without an SDK, whose versions come and go."""

    def __init__(self, base_url: str, vocab_size: int = 2000) -> None:
        """`vocab_size`: all tokens are below."""
        self.vocab_size = vocab_size
        self.tokens = [token % vocab_size for token in TOKENS]
        self.http = httpx.Client(base_url=f"{base_url}/api/v1", headers={"x-api-key": KEY}, timeout=120)

    def post(self, path: str, /, **body: Any) -> Any:
        return self.http.post(path, json=body).raise_for_status().json()

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def result(self, request_id: str) -> Any:
        while (answer := self.http.post("/retrieve_future", json={"request_id": request_id})).status_code == 408:
            pass
        found = answer.raise_for_status().json()
        assert "error" not in found, found
        return found

    def run(self, path: str, /, **body: Any) -> Any:
        """An operation's result."""
        return self.result(self.post(path, **body)["request_id"])

    def forward_backward(
        self, model_id: str, seq_id: int, shift: int = 0, *, backward: bool = True, image: bytes = b""
    ) -> list[float]:
        """Log probabilities of a datum, which begins with an image if there is one."""
        targets = [(token + shift) % self.vocab_size for token in self.tokens[1:]]
        weights = [1.0] * len(targets)
        chunks: list[Any] = [{"type": "encoded_text", "tokens": self.tokens[:-1]}]
        if image:
            data = base64.b64encode(image).decode()
            chunks.insert(0, {"type": "image", "data": data, "format": "png", "expected_tokens": IMAGE_TOKENS})
            targets, weights = [0] * IMAGE_TOKENS + targets, [0.0] * IMAGE_TOKENS + weights
        datum = {
            "model_input": {"chunks": chunks},
            "loss_fn_inputs": {
                "target_tokens": {"data": targets, "dtype": "int64", "shape": [len(targets)]},
                "weights": {"data": weights, "dtype": "float32", "shape": [len(targets)]},
            },
        }
        content = {"data": [datum], "loss_fn": "cross_entropy"}
        name = "forward_backward" if backward else "forward"
        result = self.run(f"/{name}", model_id=model_id, seq_id=seq_id, **{f"{name}_input": content})
        logprobs: list[float] = result["loss_fn_outputs"][0]["logprobs"]["data"]
        return logprobs


def fill(client: Client) -> dict[str, Any]:
    """Make the contents of a small data directory, and return the names of its parts."""
    session_id = client.post("/create_session", sdk_version="0.38.0", tags=["t"], display_name="old")["session_id"]
    lora = {"rank": 1, "seed": 7, "train_mlp": False, "train_unembed": False}
    create = {"session_id": session_id, "base_model": MODEL, "user_metadata": {"note": "größer"}}
    model = client.run("/create_model", **create, model_seq_id=0, lora_config=lora)["model_id"]
    for number in range(2):
        client.forward_backward(model, 2 * number + 1, number)
        client.run("/optim_step", model_id=model, seq_id=2 * number + 2, adam_params=ADAM)
    saved = {"model_id": model, "user_metadata": {"step": "2"}}
    state = client.run("/save_weights", **saved, seq_id=5, path="two-steps")["path"]
    weights = client.run("/save_weights_for_sampler", **saved, seq_id=6, path="kept", ttl_seconds=315_360_000)["path"]
    exported = client.run("/save_weights_external", **saved, seq_id=7, path="out")["path"]
    unnamed = client.run("/save_weights_for_sampler", model_id=model, seq_id=8, sampling_session_seq_id=0)
    lora = {"rank": 1, "seed": 2**62, "train_attn": False, "train_mlp": False}
    suspended = client.run("/create_model", **create, model_seq_id=1, lora_config=lora)["model_id"]
    client.forward_backward(suspended, 1)
    sampled = client.post(
        "/asample",
        sampling_session_id=unnamed["sampling_session_id"],
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": client.tokens}]},
        sampling_params={"max_tokens": 4, "temperature": 0.0},
    )["request_id"]
    client.result(sampled)
    client.post("/create_session", sdk_version="0.38.0", tags=[], project_id="p")
    return {
        "session": session_id,
        "model": model,
        "state": state,
        "weights": weights,
        "exported": exported,
        "suspended": suspended,
        "sampled": sampled,
    }


def measure(client: Client, parts: dict[str, Any]) -> dict[str, Any]:
    """A server's answers about the directory and results from it."""
    run = client.get(f"/training_runs/{parts['model']}")
    run["model_owner"] = run["model_owner"].removeprefix("tml:organization_user:")  # older servers sent the name alone
    listed = client.get(f"/training_runs/{parts['model']}/checkpoints")["checkpoints"]
    session = client.get(f"/sessions/{parts['session']}")
    sampled = client.result(parts["sampled"])
    other = client.post("/create_session", sdk_version="0.38.0", tags=[])["session_id"]
    place = {"session_id": other, "model_seq_id": 0}
    loaded = client.run("/load_weights", **place, path=parts["state"], optimizer=True)["model_id"]
    before = client.forward_backward(loaded, 1, 2)
    step = client.run("/optim_step", model_id=loaded, seq_id=2, adam_params=ADAM)
    after = client.forward_backward(loaded, 3, 2, backward=False)
    resumed = client.run("/optim_step", model_id=parts["suspended"], seq_id=2, adam_params=ADAM)
    resumed_after = client.forward_backward(parts["suspended"], 3, backward=False)
    sample = sample_from(client, other, 0, parts["weights"])
    urls = client.get(f"/training_runs/{parts['model']}/checkpoints/external_weights/out/external_weights_urls")["urls"]
    return {
        "run": {name: run[name] for name in ("base_model", "lora_rank", "user_metadata", "model_owner")},
        "listed": [{k: one.get(k) for k in ("tinker_path", "size_bytes", "user_metadata", "public")} for one in listed],
        "session": {name: session[name] for name in ("training_run_ids", "sampler_ids", "display_name")},
        "info": client.post("/weights_info", tinker_path=parts["state"]),
        "sampled": sampled["sequences"][0],
        "before": before,
        "grad_norm": step["metrics"],
        "after": after,
        "resumed": resumed["metrics"],
        "resumed_after": resumed_after,
        **sample,
        "files": {name: len(httpx.get(url).content) for name, url in sorted(urls.items())},
    }


def sample_from(client: Client, session_id: str, number: int, path: str) -> dict[str, Any]:
    """Return the greedy sample from saved weights, its log probabilities, and those of the prompt."""
    session = {"session_id": session_id, "sampling_session_seq_id": number}
    sampler = client.post("/create_sampling_session", **session, model_path=path)["sampling_session_id"]
    sample = client.run(
        "/asample",
        sampling_session_id=sampler,
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": client.tokens}]},
        sampling_params={"max_tokens": 6, "temperature": 0.0},
        prompt_logprobs=True,
    )
    (sequence,) = sample["sequences"]
    return {
        "tokens": sequence["tokens"],
        "logprobs": sequence["logprobs"],
        "scores": sample["prompt_logprobs"][1:],
    }


def fill_mixture(client: Client) -> dict[str, Any]:
    """Make a run of two steps that trains all modules, with a checkpoint, weights of each kind, and a gradient."""
    session_id = client.post("/create_session", sdk_version="0.38.0", tags=[])["session_id"]
    create = {"session_id": session_id, "base_model": MODEL, "model_seq_id": 0}
    model = client.run("/create_model", **create, lora_config={"rank": 2, "seed": 7})["model_id"]
    for number in range(2):
        client.forward_backward(model, 2 * number + 1, number)
        client.run("/optim_step", model_id=model, seq_id=2 * number + 2, adam_params=ADAM)
    state = client.run("/save_weights", model_id=model, seq_id=5, path="two-steps")["path"]
    weights = client.run("/save_weights_for_sampler", model_id=model, seq_id=6, path="kept")["path"]
    exported = client.run("/save_weights_external", model_id=model, seq_id=7, path="out")["path"]
    client.forward_backward(model, 8, 3)
    return {"model": model, "state": state, "weights": weights, "exported": exported}


def measure_mixture(client: Client, parts: dict[str, Any]) -> dict[str, Any]:
    """Measure how the run goes on, from its snapshot and from its checkpoint, and what its weights sample."""
    session_id = client.post("/create_session", sdk_version="0.38.0", tags=[])["session_id"]
    place = {"session_id": session_id, "model_seq_id": 0}
    loaded = client.run("/load_weights", **place, path=parts["state"], optimizer=True)["model_id"]
    client.forward_backward(loaded, 1, 3)
    measured: dict[str, Any] = {}
    for name, model, seq_id in (("resumed", parts["model"], 9), ("loaded", loaded, 2)):
        step = client.run("/optim_step", model_id=model, seq_id=seq_id, adam_params=ADAM)["metrics"]
        after = client.forward_backward(model, seq_id + 1, backward=False)
        again = client.run("/save_weights_for_sampler", model_id=model, seq_id=seq_id + 2, path="again")["path"]
        measured[name] = {"step": step, "after": after, "sampled": sample_from(client, session_id, seq_id, again)}
    for number, name in enumerate(("weights", "exported")):
        measured[name] = sample_from(client, session_id, number, parts[name])
    return measured


def fill_killed(client: Client) -> dict[str, Any]:
    """Make three models: one with a snapshot and a log, one with a log alone, one with an operation that waits."""
    session_id = client.post("/create_session", sdk_version="0.38.0", tags=[])["session_id"]
    models = [
        client.run(
            "/create_model",
            session_id=session_id,
            base_model=MODEL,
            model_seq_id=number,
            lora_config={"rank": 1, "seed": number, "train_mlp": False, "train_unembed": False},
        )["model_id"]
        for number in range(3)
    ]
    client.forward_backward(models[0], 1)
    time.sleep(SNAPSHOT_EVERY_S)
    stepped = client.post("/optim_step", model_id=models[0], seq_id=2, adam_params=ADAM)["request_id"]
    client.result(stepped)  # a snapshot is taken now
    client.forward_backward(models[0], 3, 1, image=IMAGE)
    client.run("/optim_step", model_id=models[0], seq_id=4, adam_params=ADAM)
    client.forward_backward(models[0], 5, 2, image=IMAGE)
    client.forward_backward(models[1], 1, 3)
    client.run("/optim_step", model_id=models[1], seq_id=2, adam_params=ADAM)
    client.forward_backward(models[1], 3, 4)
    waiting = client.post("/save_weights", model_id=models[2], seq_id=3, path="late")["request_id"]
    return {"models": models, "stepped": stepped, "waiting": waiting}


def measure_killed(client: Client, parts: dict[str, Any]) -> dict[str, Any]:
    """Measure what a server makes of the logs and of the operation that waits."""
    snapshot_and_log, log, _ = parts["models"]
    measured: dict[str, Any] = {"stepped": client.result(parts["stepped"])["metrics"]}
    for name, model, seq_id, image in (("both", snapshot_and_log, 6, IMAGE), ("log", log, 4, b"")):
        measured[name] = [
            client.run("/optim_step", model_id=model, seq_id=seq_id, adam_params=ADAM)["metrics"],
            client.forward_backward(model, seq_id + 1, backward=False, image=image),
        ]
    measured["waiting"] = client.result(parts["waiting"])["path"]
    return measured


def require_logs(data_dir: Path, parts: dict[str, Any]) -> None:
    """Check what lies in the directory of a server that was killed."""
    with contextlib.closing(sqlite3.connect(data_dir / "tinker-server.db")) as db:
        runs = dict(db.execute("SELECT model_id, snapshot FROM training_runs"))
        logged = dict(db.execute("SELECT lane, count(*) FROM futures WHERE position IS NOT NULL GROUP BY lane"))
        (queued,) = db.execute("SELECT request_id FROM futures WHERE status = 'queued'").fetchone()
        images = db.execute("SELECT count(*) FROM images").fetchone(), db.execute("SELECT count(*) FROM image_places")
        assert db.execute("SELECT version_num FROM alembic_version").fetchone() == (SCHEMA_OF_AB350A7,)
        assert (images[0], images[1].fetchone()) == ((1,), (2,))
    assert [runs[model] is not None for model in parts["models"]] == [True, False, False], runs
    assert [logged[model] for model in parts["models"][:2]] == [3, 3], logged
    assert queued == parts["waiting"]


async def copy_database(file: Path, url: str) -> None:
    """Copy the tables of an older server from its file to an empty database of another kind."""
    db = Database(url)
    await db.migrate(SCHEMA_OF_AB350A7)
    async with db.write_rows() as connection:
        await connection.run_sync(_insert_all, file)
    await db.close()


CONVERSIONS: dict[Any, Callable[[Any], Any]] = {JSON: json.loads, Boolean: bool}
"""By the type of a column, from SQLite's values to Python's."""


def _insert_all(connection: Connection, file: Path) -> None:
    metadata = MetaData()
    metadata.reflect(connection)
    with contextlib.closing(sqlite3.connect(file)) as source:
        source.row_factory = sqlite3.Row
        for table in metadata.sorted_tables:
            rows = [dict(row) for row in source.execute(f"SELECT * FROM {table.name}")]
            for column in table.columns:
                convert = CONVERSIONS.get(column.type._type_affinity)
                if convert is None:
                    continue
                for row in rows:
                    row[column.name] = None if row[column.name] is None else convert(row[column.name])
            if rows and table.name != "alembic_version":
                connection.execute(table.insert(), rows)


def make_young(data_dir: Path) -> None:
    """Move all its times to now: what is old is deleted, and clients that are silent for long are forgotten."""
    with sqlite3.connect(data_dir / "tinker-server.db") as db:
        (newest,) = db.execute("SELECT max(last_heartbeat) FROM sessions").fetchone()
        for table, columns in (
            ("sessions", ["created_at", "last_heartbeat"]),
            ("sampling_sessions", ["created_at"]),
            ("checkpoints", ["created_at"]),
            ("futures", ["created_at", "finished_at"]),
        ):
            for column in columns:
                db.execute(f"UPDATE {table} SET {column} = {column} + ?", (time.time() - newest,))
    db.close()


class Made(NamedTuple):
    """A data directory in tests/data, with the numbers that belong to it."""

    name: str
    fill: Callable[[Client], dict[str, Any]]
    measure: Callable[[Client, dict[str, Any]], dict[str, Any]]
    vocab_size: int = 2000
    has_model: bool = False
    """True if its base model is in the directory, and not the embedded model."""

    def models(self, data_dir: Path) -> dict[str, Path]:
        """Return the base models of its server, by name."""
        return {MODEL: data_dir / "model" if self.has_model else DIRECTORIES[MODEL]}

    def client(self, server: Server) -> Client:
        """Return a client whose tokens the model has."""
        return Client(server.base_url, self.vocab_size)

    @property
    def archive(self) -> Path:
        return DATA / f"{self.name}.tar.xz"

    @property
    def expected(self) -> Path:
        return DATA / f"{self.name}.json"


STOPPED = Made("directory-of-073f48b", fill, measure)
KILLED = Made("directory-of-ab350a7", fill_killed, measure_killed)
MIXTURE = Made("directory-of-b6afec41", fill_mixture, measure_mixture, vocab_size=300, has_model=True)


def make_mixture(directory: Path) -> None:
    """A mixture of a layer with four experts."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "tie_word_embeddings": True}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    make_tiny_of("qwen3_moe", directory, **sizes, **experts, mlp_only_layers=[])


def main(checkout: Path, name: str) -> None:
    made = {"stopped": STOPPED, "killed": KILLED, "mixture": MIXTURE}[name]
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        data_dir, again = Path(scratch) / "data", Path(scratch) / "again"
        if made.has_model:
            make_mixture(data_dir / "model")
        settings = {"snapshot_every_s": SNAPSHOT_EVERY_S} if made is KILLED else {"session_timeout_s": 2}
        server = Server(data_dir, made.models(data_dir), checkout=checkout, **settings).start()
        parts = made.fill(made.client(server))
        if made is not KILLED:
            suspended, count = ("suspended", 2) if made is STOPPED else ("snapshots", 1)
            while len(list(data_dir.glob(f"checkpoints/*/{suspended}/*"))) < count:
                time.sleep(0.2)
            server.stop()
        else:
            server.kill()
            require_logs(data_dir, parts)
        (data_dir / "link-secret").unlink(missing_ok=True)
        shutil.rmtree(data_dir / "scratch", ignore_errors=True)
        with tarfile.open(made.archive, "w:xz") as tar:
            tar.add(data_dir, ".")
        shutil.copytree(data_dir, again)
        server = Server(again, made.models(again), checkout=checkout).start()
        expected = made.measure(made.client(server), parts)
        server.stop()
    made.expected.write_text(json.dumps({"parts": parts, "expected": expected}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
