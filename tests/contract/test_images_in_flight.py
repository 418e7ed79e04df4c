"""An owner's image prompts in flight are bounded by their pixels, in samples and in chats.

pytest tests/contract/test_images_in_flight.py
"""

import base64
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.factories import photo
from tests.fake_server import Running
from tinker_server.auth import keys
from tinker_server.models import admission

SMALL = photo(8, 8)
"""A file of some hundred bytes; the fake counts 1 MiB of pixels for an image."""
IMAGE = {"type": "image", "format": "png", "data": base64.b64encode(SMALL).decode()}
URI = f"data:image/png;base64,{IMAGE['data']}"
OPENAI = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URI}}]}]
SOURCE = {"type": "base64", "media_type": "image/png", "data": IMAGE["data"]}
ANTHROPIC = [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]


def chat(server: Running, path: str, messages: list[dict[str, Any]]) -> httpx.Response:
    return server.http.post(f"{server.url}{path}", json={"model": "tiny", "max_tokens": 1, "messages": messages})


def test_images_in_flight_are_bounded_by_pixels_and_text_and_other_owners_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_IMAGE_BYTES", 3 << 20)
    alice, bob = (keys.add(tmp_path / "keys", name) for name in ("alice", "bob"))
    server = Running(tmp_path)
    try:
        server.http.headers["x-api-key"] = alice
        sampler, prompt = server.sampler(), {"chunks": [{"type": "encoded_text", "tokens": [1]}, IMAGE]}
        server.set_gate(server.backend.tiny.sampler.gate, is_open=False)
        accepted = [server.sample(sampler, number, prompt=prompt, num_samples=4) for number in range(3)]
        assert [answer.status_code for answer in accepted] == [200] * 3, "images count once, not once a sample"
        refused = server.sample(sampler, 3, prompt=prompt)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) < 10
        assert "3145728 bytes of images' pixels are in flight; 3145728 are allowed" in refused.text
        assert chat(server, "/v1/chat/completions", OPENAI).status_code == 429
        assert chat(server, "/v1/messages", ANTHROPIC).status_code == 429
        assert server.sample(sampler, 4).status_code == 200, "text"
        server.http.headers["x-api-key"] = bob
        assert server.sample(server.sampler(), 0, prompt=prompt).status_code == 200
        server.http.headers["x-api-key"] = alice
        server.set_gate(server.backend.tiny.sampler.gate, is_open=True)
        for answer in accepted:
            assert server.result(answer).status_code == 200
        assert server.sample(sampler, 3, prompt=prompt).status_code == 200, "there is room again"
        assert chat(server, "/v1/chat/completions", OPENAI).status_code == 200
        assert chat(server, "/v1/messages", ANTHROPIC).status_code == 200
        deadline = time.monotonic() + 5
        while server.app.state.services.admission.samples.totals[2] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.app.state.services.admission.samples.totals[2] == 0
    finally:
        server.set_gate(server.backend.tiny.sampler.gate, is_open=True)
        server.stop()
