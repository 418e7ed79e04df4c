"""The endpoint that Prometheus scrapes. Totals are over all owners: every key may see them."""

import ipaddress

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tinker_server.errors import ScopeRefused
from tinker_server.offload import LARGE, off_loop
from tinker_server.routes.metrics_collect import Reading, read
from tinker_server.web.deps import AppSettings, Server, Services
from tinker_server.web.gate import find_key

router = APIRouter()
_BEARER = "bearer "
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")


@router.get("/metrics", include_in_schema=False)
async def get_metrics(http: Request, server: Server, settings: AppSettings) -> Response:
    """Return all metrics in Prometheus' text format."""
    is_open = settings.metrics_open and _is_on_this_machine(http)
    owner = "" if is_open else require_key(http, server)
    reading: Reading = await read(server, owner)
    return Response(await off_loop(owner, LARGE, generate_latest, reading), media_type=CONTENT_TYPE_LATEST)


def require_key(http: Request, server: Services) -> str:
    """Return the owner of the key in X-API-Key, or in the bearer token that Prometheus sends. Raises Unauthenticated,
    ScopeRefused."""
    given = http.headers.get("authorization", "")
    bearer = given[len(_BEARER) :] if given.lower().startswith(_BEARER) else None
    key = find_key(http.headers.get("x-api-key") or bearer, server.keys, server.tokens, reads_bearer=True)
    if key.scope == "sample":
        raise ScopeRefused(f"the API key {key.id} of {key.name} has the scope sample, which does not include /metrics")
    return key.name


def _is_on_this_machine(http: Request) -> bool:
    """Return whether the scraper is local. A request that a local proxy forwards may come from anywhere."""
    if http.client is None or any(name in http.headers for name in _PROXY_HEADERS):
        return False
    return ipaddress.ip_address(http.client.host).is_loopback
