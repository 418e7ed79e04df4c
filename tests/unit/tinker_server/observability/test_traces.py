"""The timeline of a session that did much."""

import json
from pathlib import Path

import httpx
import pytest
from sqlalchemy import insert

from tests.fakes import FakeBackend
from tests.stalls import longest_stall
from tinker_server.api_schemas.sessions import CreateSessionRequest
from tinker_server.app import create_app
from tinker_server.auth.keys import LOCAL
from tinker_server.settings import Settings
from tinker_server.store.database import Database
from tinker_server.store.tables import Future, SamplingSessionRow
from tinker_server.web.deps import Services

NUM_OPERATIONS = 20_000


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
@pytest.mark.heavy
async def test_a_long_trace_is_whole_and_stalls_nothing(tmp_path: Path) -> None:
    app = create_app(Settings(data_dir=tmp_path), FakeBackend())
    async with app.router.lifespan_context(app):
        services: Services = app.state.services
        session_id = await services.sessions.create(CreateSessionRequest(), None, LOCAL)
        lane = f"{session_id}:sample:0"
        sampler = {"sampling_session_id": lane, "session_id": session_id, "base_model": "tiny", "created_at": 1.0}
        future = {"kind": "sample", "lane": lane, "request": b"", "request_type": "", "status": "done"}
        rows = [
            future | {"request_id": f"{i}", "seq_id": i, "created_at": 2.0 + i, "finished_at": 3.0 + i}
            for i in range(NUM_OPERATIONS)
        ]
        db = Database(services.settings.resolve_database_url())
        async with db.write() as writing:
            await writing.execute(insert(SamplingSessionRow), [sampler])
            await writing.execute(insert(Future), rows)
        await db.close()
        link = services.links.sign(f"traces/{session_id}", 2**40)
        transport = httpx.ASGITransport(app)
        http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        async with http, longest_stall() as stall:
            answer = await http.get(f"/api/v1/{link}")
    trace = json.loads(answer.text)
    assert [event["args"]["seq_id"] for event in trace["traceEvents"]] == list(range(NUM_OPERATIONS))
    assert trace["traceEvents"][7]["dur"] == 1e6 and trace["otherData"] == {"session_id": session_id}
    assert stall.seconds < 0.3, stall
