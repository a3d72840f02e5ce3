"""Seal what the runs of encrypted workflows write. Runs of other workflows pass unchanged, at no cost."""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.domain.codec import seal
from pipeline.domain.values import PreparedRun, Request, RunOutput
from pipeline.store.codecs import keyed_hash, plan_place
from pipeline.store.database import Database
from pipeline.store.rows import ClaimedRunRow
from pipeline.workflows.handler_types import RequestedMutation, request_hash


def sealed_plans(db: Database, planned: Sequence[tuple[ClaimedRunRow, PreparedRun]]) -> list[PreparedRun]:
    """Return plans with data and ui sealed."""
    codecs = db.codecs
    if codecs is None:
        return [plan for _, plan in planned]
    plans = []
    for run, plan in planned:
        codec, found = codecs.declared.get(run.workflow), plan
        if codec is not None:
            ids = {int(event) for reserved in plan.reservations for event in reserved.ids}
            data, ui = (
                None if value is None else seal(codec, value, *plan_place(name, run.handler_id, ids))
                for name, value in (("data", plan.data), ("ui", plan.ui))
            )
            found = replace(plan, data=data, ui=ui)
        plans.append(found)
    return plans


def sealed_outputs(db: Database, made: Sequence[tuple[ClaimedRunRow, RunOutput]]) -> list[RunOutput]:
    """Return outputs with the payloads of their events and their state sealed."""
    codecs = db.codecs
    if codecs is None or not any(codecs.is_private(run.workflow) for run, _ in made):
        return [output for _, output in made]
    outputs = []
    with db.autocommit() as tx:
        for run, output in made:
            codec, found = codecs.declared.get(run.workflow), output
            if codec is not None:
                events = tuple(codecs.seal_payload(tx, run.workflow, event) for event in output.events)
                state = seal(codec, output.state, "state", run.handler_id) if output.has_state else None
                found = replace(output, events=events, sealed_state=state)
            outputs.append(found)
    return outputs


def sealed_request(db: Database, workflow: str, request: Request) -> Request:
    """Return a request as it is written to the ledger."""
    codec = db.codecs.declared.get(workflow) if db.codecs is not None else None
    return (
        request
        if codec is None
        else replace(request, params=seal(codec, request.params, "params", request.lease.run_id))
    )


def hash_of_request(db: Database, workflow: str, asked: RequestedMutation) -> str:
    """Return the hash of a request. That of an encrypted workflow is keyed, so that it cannot be found by guessing."""
    hashed = request_hash(asked.connector, asked.operation, asked.params)
    if db.codecs is None or not db.codecs.is_private(workflow):
        return hashed
    with db.autocommit() as tx:
        return keyed_hash(db.codecs.secret(tx, workflow), hashed)


def is_private(db: Database, workflow: str) -> bool:
    """Return whether a workflow of this process is encrypted: the text of its errors is not kept."""
    return db.codecs is not None and db.codecs.is_private(workflow)
