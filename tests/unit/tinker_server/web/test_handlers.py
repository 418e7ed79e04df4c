"""Texts in a request's head that a database cannot store are refused by name."""

from fastapi.exceptions import RequestValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from tinker_server.api_schemas.base import unstorable
from tinker_server.web.handlers import storable_parameters

BYTES = st.lists(st.sampled_from([b"a", b"%", b"00", b"%00", b"%2500", b"\0", b"\xe9", b"&", b"%ED%A0%80"]), max_size=4)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.text(st.sampled_from("a\u00e9\0\ud800"), max_size=3), BYTES.map(b"".join), BYTES.map(b"".join))
async def test_a_head_is_refused_for_what_a_walk_through_its_values_finds(
    name: str, query: bytes, header: bytes
) -> None:
    """A head that is plainly right is not walked through."""
    scope = {
        "type": "http",
        "path": f"/runs/{name}",
        "path_params": {"run": name},
        "query_string": b"x=" + query,
        "headers": [(b"x-a", b"1"), (b"x-b", header)],
    }
    http = Request(scope)
    values = (http.path_params["run"], *http.query_params.values(), *http.headers.values())
    problems = [problem for value in values if (problem := unstorable(value)) is not None]
    try:
        await storable_parameters(http)
        assert not problems
    except RequestValidationError as error:
        assert [one["msg"] for one in error.errors()] == problems[:1]
