"""All endpoints under /v1, in one router."""

from fastapi import APIRouter

from pipeline.api.v1 import (
    attention,
    bulk,
    connectors,
    events,
    me,
    mutations,
    publish,
    records,
    runs,
    tokens,
    workflows,
)

#: The routers of all subjects.
PARTS = tuple(
    part.router
    for part in (attention, bulk, connectors, events, me, mutations, publish, records, runs, tokens, workflows)
)
router = APIRouter(prefix="/v1")
for _part in PARTS:
    router.include_router(_part)
