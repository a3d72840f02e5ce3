"""Collect the pages of the operator console."""

from fastapi import APIRouter

from pipeline.api.console import (
    account,
    audit,
    bulk,
    connectors,
    events,
    inbox,
    ledger,
    mutations,
    quarantine,
    runs,
    system,
    workflows,
)

_MODULES = (inbox, mutations, bulk, workflows, runs, events, ledger, quarantine, connectors, system, audit, account)

router = APIRouter()
for module in _MODULES:
    router.include_router(module.router)
