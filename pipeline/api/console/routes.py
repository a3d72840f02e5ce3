"""Collect the pages of the operator console."""

from fastapi import APIRouter

from pipeline.api.console import (
    account,
    audit,
    bulk,
    events,
    inbox,
    ledger,
    mutations,
    quarantine,
    runs,
    workflows,
)

router = APIRouter()
for module in (inbox, mutations, bulk, workflows, runs, events, ledger, quarantine, audit, account):
    router.include_router(module.router)
