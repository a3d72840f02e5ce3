"""The pages of the operator console, one router per subject."""

from pipeline.api.console import account, bulk, connectors, events, inbox, mutations, runs, system, workflows

#: The routers of all subjects.
ROUTERS = tuple(part.router for part in (inbox, mutations, bulk, workflows, runs, events, connectors, system, account))
