"""Answer probes: whether this process lives, and whether it can do its work."""

from typing import Annotated

from fastapi import APIRouter, Depends

from pipeline.admin import database
from pipeline.api.context import Services, services

router = APIRouter(tags=["health"])


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """Answer that this process lives. Asks no other system."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(found: Annotated[Services, Depends(services)]) -> dict[str, str]:
    """Answer whether the database can be used and has the schema of this code."""
    database.check_readiness(found.db)
    return {"status": "ok"}
