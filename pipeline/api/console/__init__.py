"""The pages of the operator console."""

from fastapi import APIRouter

from pipeline.api.console import bulk, events, inbox, ledger, mutations, runs, workflows

router = APIRouter()
for module in (inbox, mutations, bulk, workflows, runs, events, ledger):
    router.include_router(module.router)
