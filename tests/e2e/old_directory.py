"""A data directory as an older server left it, and what that server computed from it.

`python -m tests.e2e.old_directory CHECKOUT` runs the server of a checkout (073f48b made the one in tests/data) with
the embedded model, fills a data directory, stops, serves a copy of it again and records what `measure` finds there.
"""

import json
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.servers import KEY, Server

DATA = Path(__file__).parents[1] / "data"
ARCHIVE, EXPECTED = DATA / "directory-of-073f48b.tar.xz", DATA / "directory-of-073f48b.json"
MODEL = "tinker-server/tiny-vl"
TOKENS = [41, 7, 300, 12, 99, 640, 5, 18]
ADAM = {"learning_rate": 0.01}


class Client:
    """The API without an SDK, whose versions come and go."""

    def __init__(self, base_url: str) -> None:
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

    def forward_backward(self, model_id: str, seq_id: int, shift: int = 0, *, backward: bool = True) -> list[float]:
        """Log probabilities of a datum."""
        targets = [(token + shift) % 2000 for token in TOKENS[1:]]
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": targets, "dtype": "int64", "shape": [len(targets)]},
                "weights": {"data": [1.0] * len(targets), "dtype": "float32", "shape": [len(targets)]},
            },
        }
        content = {"data": [datum], "loss_fn": "cross_entropy"}
        name = "forward_backward" if backward else "forward"
        result = self.run(f"/{name}", model_id=model_id, seq_id=seq_id, **{f"{name}_input": content})
        logprobs: list[float] = result["loss_fn_outputs"][0]["logprobs"]["data"]
        return logprobs


def fill(client: Client) -> dict[str, Any]:
    """What a small data directory holds; the names of its parts."""
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
        prompt={"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
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
    """What a server says of the directory and computes from it."""
    run = client.get(f"/training_runs/{parts['model']}")
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
    sampler = client.post(
        "/create_sampling_session", session_id=other, sampling_session_seq_id=0, model_path=parts["weights"]
    )
    sample = client.run(
        "/asample",
        sampling_session_id=sampler["sampling_session_id"],
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
        sampling_params={"max_tokens": 6, "temperature": 0.0},
        prompt_logprobs=True,
    )
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
        "tokens": sample["sequences"][0]["tokens"],
        "logprobs": sample["sequences"][0]["logprobs"],
        "scores": sample["prompt_logprobs"][1:],
        "files": {name: len(httpx.get(url).content) for name, url in sorted(urls.items())},
    }


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


def main(checkout: Path) -> None:
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        data_dir, again = Path(scratch) / "data", Path(scratch) / "again"
        models = {MODEL: checkout / "tinker_server" / "tiny_vl"}
        server = Server(data_dir, models, checkout=checkout, session_timeout_s=2).start()
        parts = fill(Client(server.base_url))
        while len(list(data_dir.glob("checkpoints/*/suspended/*"))) < 2:
            time.sleep(0.2)
        server.stop()
        (data_dir / "link-secret").unlink()
        shutil.rmtree(data_dir / "scratch", ignore_errors=True)
        with tarfile.open(ARCHIVE, "w:xz") as tar:
            tar.add(data_dir, ".")
        shutil.copytree(data_dir, again)
        server = Server(again, models, checkout=checkout).start()
        expected = measure(Client(server.base_url), parts)
        server.stop()
    EXPECTED.write_text(json.dumps({"parts": parts, "expected": expected}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
