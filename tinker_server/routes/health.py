"""Whether the server lives: for load balancers and containers, which have no API key."""

from fastapi import APIRouter

from api_schemas.service import HealthResponse

router = APIRouter()


@router.get("/healthz")
async def healthz() -> HealthResponse:
    """Whether the server takes requests."""
    return HealthResponse()
