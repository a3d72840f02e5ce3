"""All endpoints under /v1, one router per subject."""

from pipeline.api.v1 import attention, bulk, connectors, events, mutations, records, runs, tokens, workflows

#: The routers of all subjects.
ROUTERS = tuple(
    part.router for part in (attention, bulk, connectors, events, mutations, records, runs, tokens, workflows)
)
