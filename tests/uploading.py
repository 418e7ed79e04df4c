"""An upload of an adapter, as the documentation of the SDK describes it from 0.39: two posts and two plain PUTs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Started:
    """An upload. `api` has a key and the server's address."""

    api: httpx.Client
    upload_id: str
    links: Mapping[str, Mapping[str, object]]

    @classmethod
    def of(cls, api: httpx.Client, base_model: str, rank: int = 8, **lora: object) -> "Started":
        body = {"base_model": base_model, "lora_config": {"rank": rank, **lora}}
        started = api.post("/external_weights_upload_start", json=body)
        assert started.status_code == 200, started.text
        assert set(started.json()["urls"]) == set(FILES)
        return cls(api, started.json()["upload_id"], started.json()["urls"])

    def put(self, files: Mapping[str, bytes]) -> "Started":
        for name, content in files.items():
            put = httpx.put(str(self.links[name]["url"]), content=content, timeout=20)
            assert put.status_code == 200 and put.json() == {"size_bytes": len(content)}, put.text
        return self

    def upload(self, folder: Path) -> "Started":
        """Stream each file in a PUT with its link's headers and no length, as `UploadURL.upload` does from 0.40."""
        for name, link in self.links.items():
            headers: Any = link["headers"]
            with (folder / name).open("rb") as file:
                put = httpx.put(str(link["url"]), content=iter(lambda: file.read(64), b""), headers=headers, timeout=20)
            assert "content-length" not in put.request.headers and put.request.headers["transfer-encoding"] == "chunked"
            assert put.json() == {"size_bytes": (folder / name).stat().st_size}, put.text
        return self

    def finish(self) -> httpx.Response:
        return self.api.post("/external_weights_upload_finish", json={"upload_id": self.upload_id})
