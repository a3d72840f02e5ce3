"""Act on many mutations or quarantined events at once: preview, then commit or discard.

A preview is frozen. It stores the exact items, each with the token of the state in which it was shown, and what would
be refused. Its commit acts on each item in a transaction of its own, so a stale item is refused and the others go on.
Progress is kept in the preview, where it can be read during and after the commit. HTTP API, console and command line
use these calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from pipeline.admin import attention, lookup, provider_export
from pipeline.admin.given_results import GivenResult
from pipeline.admin.provider_export import RowResults
from pipeline.admin.quarantine import Quarantine, QuarantineAction, QuarantineEntry, QuarantineFilter
from pipeline.admin.resolutions import (
    PROPOSED_TEXT,
    MutationFilter,
    MutationSummary,
    Resolution,
    ResolutionKind,
    Resolutions,
    resolutions_for,
)
from pipeline.domain.acts import EVENT_ACTS, MAX_ITEMS, BulkAct, NewPreview
from pipeline.domain.codec import opened
from pipeline.domain.errors import InvalidInputError, NotFoundError, PipelineError
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import Actor
from pipeline.store.reads import access
from pipeline.store.schema import BulkPreviewRow
from pipeline.transitions import bulk

SAMPLE_SIZE = 20
_CHUNK_SIZE = 50  #: items between two reports of progress
_APPROVALS = (BulkAct.APPROVE, BulkAct.REJECT)
_EVENT_ACTIONS = {
    BulkAct.RELEASE_EVENT: QuarantineAction.RELEASE,
    BulkAct.SKIP_EVENT: QuarantineAction.SKIP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationSelection:
    """Which mutations: exactly one of ids, an incident, or a filter."""

    ids: tuple[UUID, ...] = ()
    incident: str | None = None
    only: MutationFilter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """How a provider's export is read, as ``pipeline resolve-from`` takes it."""

    column: str
    match_by: str
    results: RowResults = field(default_factory=RowResults)
    is_complete: bool = False
    only: MutationFilter = field(default_factory=MutationFilter)
    recent: int = 1_000_000  #: rows of the ledger that are searched for the same value


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewItem:
    """One item of a preview."""

    subject: str  #: id of the mutation, or "event id/handler"
    state: str  #: in which it was shown
    workflow: str
    headline: str
    act: str
    problem: str | None  #: before the commit: why it would be refused; after it: why it was


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkPreview:
    """A frozen preview of an act on many items, and what became of it."""

    id: UUID
    act: BulkAct
    status: str  #: open, expired, discarded, running or finished
    created_by: str
    created_at: datetime
    expires_at: datetime
    workflows: tuple[str, ...]
    request: Mapping[str, Any]
    count: int
    items: tuple[PreviewItem, ...]
    left_out: Mapping[str, int]  #: what is not in it, by reason: ambiguous, not_in_export, unmatched_rows
    reason: str
    committed_by: str | None
    committed_at: datetime | None
    finished_at: datetime | None
    done: int
    updated: tuple[str, ...]
    refused: Mapping[str, str]  #: before the commit: what would be refused, and why

    @property
    def sample(self) -> tuple[PreviewItem, ...]:
        """Return the first items, for people."""
        return self.items[:SAMPLE_SIZE]


class BulkActs:
    """Preview, commit and discard acts on many items.

    ``can_see`` says which workflows the operator may act on. Items of other workflows are left out of a selection.
    """

    def __init__(
        self, resolutions: Resolutions, quarantine: Quarantine, can_see: Callable[[str], bool] = lambda _: True
    ) -> None:
        self.resolutions, self.quarantine, self.can_see = resolutions, quarantine, can_see

    def preview_mutations(
        self, act: BulkAct, selection: MutationSelection, by: str, *, result: GivenResult | None = None
    ) -> BulkPreview:
        """Freeze an act on mutations. Nothing is changed."""
        if act in EVENT_ACTS or act is BulkAct.IMPORT:
            raise InvalidInputError(f"{act} is no act on a selection of mutations; expected a resolution or approval.")
        self._require_workflow(selection.only.workflow if selection.only is not None else None)
        chosen = [each for each in self._selected_mutations(act, selection) if self.can_see(each.workflow)]
        if act is BulkAct.HAPPENED and (result is None or result.external_id is not None):
            raise InvalidInputError(
                "Many mutations happened, and no common result was given; expected a value, or explicitly none. "
                "Results by external id come from an import."
            )
        problems = self._problems(act, chosen, by, result)
        items = [_mutation_item(each, str(act), result if act is BulkAct.HAPPENED else None) for each in chosen]
        return self._freeze(act, by, items, problems, request=_described(selection))

    def preview_events(self, act: BulkAct, only: QuarantineFilter, by: str) -> BulkPreview:
        """Freeze an act on quarantined events. Nothing is changed."""
        if act not in EVENT_ACTS:
            raise InvalidInputError(f"{act} is no act on quarantined events; expected release_event or skip_event.")
        self._require_workflow(only.workflow)
        found = self.quarantine.entries(only, limit=MAX_ITEMS + 1)
        items = [_event_item(each, str(act)) for each in found if self.can_see(each.workflow)]
        return self._freeze(act, by, items, {}, request={"filter": _plain(asdict(only))})

    def preview_import(
        self, rows: Iterable[Mapping[str, Any]], options: ImportOptions, by: str, *, name: str
    ) -> BulkPreview:
        """Freeze what a provider's export resolves. Only unambiguous matches are in it; the others are counted."""
        self._require_workflow(options.only.workflow)
        candidates = self.resolutions.match_candidates(
            options.match_by, options.only, limit=MAX_ITEMS + 1, recent=options.recent
        )
        visible = [each for each in candidates if self.can_see(each.mutation.workflow)]
        found = provider_export.preview(
            visible, rows, options.column, results=options.results, is_complete=options.is_complete
        )
        items = [
            {**_mutation_item(each.mutation, str(each.kind), each.result), "evidence": _plain(each.evidence or {})}
            for each in found.resolutions
        ]
        problems = self.resolutions.problems(found.resolutions, Actor(name=by, reason="preview"))
        return self._freeze(
            BulkAct.IMPORT,
            by,
            items,
            {str(key): text for key, text in problems.items()},
            request={"export": name, "column": options.column, "complete": options.is_complete},
            left_out={
                "ambiguous": len(found.ambiguous),
                "not_in_export": len(found.not_in_export),
                "unmatched_rows": found.unmatched_rows,
                "possibly_shared": sum(each.is_partial for each in visible),
            },
        )

    def preview(self, preview_id: UUID) -> BulkPreview:
        """Return a preview, during and after its commit too."""
        with self.resolutions.db.transaction() as tx:
            row, now = access.bulk_preview(tx, preview_id), tx.clock()
        if row is None or not all(self.can_see(workflow) for workflow in row.workflows):
            raise NotFoundError("bulk preview", preview_id, hint="Previews are kept for 30 days.")
        return _preview(row, now)

    def discard(self, preview_id: UUID) -> BulkPreview:
        """Throw a preview away before it is committed."""
        self.preview(preview_id)
        with self.resolutions.db.transaction() as tx:
            return _preview(bulk.discard(tx, preview_id), tx.clock())

    def take(self, preview_id: UUID, by: Actor, *, count: int) -> BulkPreview:
        """Take the commit for an operator who saw ``count`` items. ``run`` then acts."""
        if not by.reason:
            raise InvalidInputError(f"{by.name} gave no reason; expected one, for the audit.")
        self.preview(preview_id)
        with self.resolutions.db.transaction() as tx:
            return _preview(bulk.take(tx, preview_id, by, item_count=count), tx.clock())

    def run(self, preview_id: UUID, by: Actor) -> BulkPreview:
        """Act on the items that are left, and keep progress after each chunk."""
        with self.resolutions.db.transaction() as tx:
            row = access.bulk_preview(tx, preview_id)
        if row is None or row.committed_by != by.name:
            raise NotFoundError("bulk preview taken by this operator", preview_id)
        items, done = list(row.items), row.done_count
        while row.finished_at is None:
            chunk = items[done : done + _CHUNK_SIZE]
            updated, refused = self._act(BulkAct(row.act), chunk, by, row.request)
            with self.resolutions.db.transaction() as tx:
                row = bulk.record_progress(
                    tx, preview_id, done_before=done, done=len(chunk), updated=updated, refused=refused
                )
            done = row.done_count
        return self.preview(preview_id)

    def commit(self, preview_id: UUID, by: Actor, *, count: int) -> BulkPreview:
        """Take the commit and run it to its end."""
        self.take(preview_id, by, count=count)
        return self.run(preview_id, by)

    def _require_workflow(self, name: str | None) -> None:
        if name is None:
            return
        if not self.can_see(name):
            raise NotFoundError("workflow", name)
        with self.resolutions.db.transaction() as tx:
            lookup.require_workflow(tx, name)

    def _selected_mutations(self, act: BulkAct, selection: MutationSelection) -> list[MutationSummary]:
        if sum((bool(selection.ids), selection.incident is not None, selection.only is not None)) != 1:
            raise InvalidInputError("Expected exactly one of: ids of mutations, an incident, a filter.")
        if selection.ids:
            return self.resolutions.mutations_by_id(selection.ids)
        if selection.incident is not None:
            return attention.incident_mutations(self.resolutions, selection.incident)
        only = selection.only or MutationFilter()
        if act in _APPROVALS:
            found = self.resolutions.pending_approvals(only.workflow, limit=MAX_ITEMS + 1)
            names = (only.connector, only.operation)
            return [
                each
                for each in found
                if all(name in (None, own) for name, own in zip(names, (each.connector, each.operation), strict=True))
            ]
        return self.resolutions.unresolved_mutations(only, limit=MAX_ITEMS + 1)

    def _problems(
        self, act: BulkAct, chosen: Sequence[MutationSummary], by: str, result: GivenResult | None
    ) -> dict[str, str]:
        problems = {str(each.id): text for each in chosen if (text := _state_problem(act, each))}
        if act not in _APPROVALS:
            kind = ResolutionKind(act)
            given = result if kind is ResolutionKind.HAPPENED else None
            found = self.resolutions.problems(resolutions_for(chosen, kind, given), Actor(name=by, reason="preview"))
            problems = {str(key): text for key, text in found.items()} | problems
        return problems

    def _freeze(
        self,
        act: BulkAct,
        by: str,
        items: Sequence[Mapping[str, Any]],
        problems: Mapping[str, str],
        *,
        request: Mapping[str, Any],
        left_out: Mapping[str, int] | None = None,
    ) -> BulkPreview:
        if not items and not any((left_out or {}).values()):
            raise InvalidInputError("Nothing was selected; expected at least one item that waits for this act.")
        new = NewPreview(
            act=act,
            created_by=by,
            workflows=tuple(sorted({item["workflow"] for item in items})),
            request=request,
            items=tuple(items),
            refused=problems,
            left_out={name: count for name, count in (left_out or {}).items() if count},
        )
        with self.resolutions.db.transaction() as tx:
            return _preview(bulk.freeze(tx, new), tx.clock())

    def _act(
        self, act: BulkAct, items: Sequence[Mapping[str, Any]], by: Actor, request: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        """Act on some items. Return those that were changed, and why others were refused."""
        if act in EVENT_ACTS:
            return self._act_on_events(act, items, by)
        if act in _APPROVALS:
            return self._act_on_approvals(act, items, by)
        is_named = act is BulkAct.IMPORT or "incident" in request  # the export or the incident is why
        evidence = {**(by.evidence or {}), **request} if is_named else by.evidence
        who = replace(by, evidence=evidence)
        known = {str(each.id): each for each in self.resolutions.mutations_by_id(_mutation_ids(items))}
        given = [_resolution(item, known[item["subject"]]) for item in items if item["subject"] in known]
        done = self.resolutions.resolve_many(given, who)
        refused = {str(key): text for key, text in done.refused.items()}
        return [str(each) for each in done.updated], refused | _gone(items, known)

    def _act_on_approvals(
        self, act: BulkAct, items: Sequence[Mapping[str, Any]], by: Actor
    ) -> tuple[list[str], dict[str, str]]:
        known = {str(each.id): each for each in self.resolutions.mutations_by_id(_mutation_ids(items))}
        updated, refused = [], _gone(items, known)
        for item in items:
            mutation = known.get(item["subject"])
            if mutation is None:
                continue
            try:
                if act is BulkAct.APPROVE:
                    if self.resolutions.approve(mutation, by, state=item["state"]) is not None:
                        refused[item["subject"]] = PROPOSED_TEXT
                else:
                    self.resolutions.reject(mutation.id, by, state=item["state"])
            except PipelineError as error:
                refused[item["subject"]] = str(error)
            if item["subject"] not in refused:
                updated.append(item["subject"])
        return updated, refused

    def _act_on_events(
        self, act: BulkAct, items: Sequence[Mapping[str, Any]], by: Actor
    ) -> tuple[list[str], dict[str, str]]:
        updated, refused = [], {}
        for item in items:
            event_id, _, handler = item["subject"].partition("/")
            only = QuarantineFilter(workflow=item["workflow"], handler=handler, event_ids=(int(event_id),))
            try:
                found = [each for each in self.quarantine.entries(only) if _event_state(each) == item["state"]]
                if not found:
                    raise InvalidInputError("It is no longer quarantined as it was shown. Nothing was changed.")
                done = self.quarantine.act(_EVENT_ACTIONS[act], found, by)
                refused.update(dict.fromkeys([item["subject"]], *done.refused.values()) if done.refused else {})
            except PipelineError as error:
                refused[item["subject"]] = str(error)
            if item["subject"] not in refused:
                updated.append(item["subject"])
        return updated, refused


def _state_problem(act: BulkAct, mutation: MutationSummary) -> str | None:
    """Return why an act would be refused in the state that is shown."""
    if act in _APPROVALS:
        is_wrong = mutation.status != MutationStatus.PENDING
        return f"It is {mutation.status}; {act} needs it to be pending." if is_wrong else None
    if mutation.status not in (MutationStatus.INDETERMINATE, MutationStatus.NEEDS_RECONCILE):
        return f"It is {mutation.status}; its outcome is not unknown."
    if act is BulkAct.DID_NOT_HAPPEN and mutation.quiet_until is not None:
        return f"Its request may still arrive until {mutation.quiet_until.isoformat()}."
    if act is BulkAct.TRY_AGAIN and not mutation.can_try_again:
        return "Its operation cannot reconcile, as far as is known here."
    return None


def _mutation_item(mutation: MutationSummary, act: str, result: GivenResult | None) -> dict[str, Any]:
    return {
        "subject": str(mutation.id),
        "state": mutation.state,
        "workflow": mutation.workflow,
        "headline": mutation.headline,
        "act": act,
        "result": None if result is None else asdict(result),
    }


def _event_item(entry: QuarantineEntry, act: str) -> dict[str, Any]:
    return {
        "subject": f"{entry.event_id}/{entry.handler}",
        "state": _event_state(entry),
        "workflow": entry.workflow,
        "headline": entry.title or f"{entry.topic} {entry.message_id}",
        "act": act,
    }


def _event_state(entry: QuarantineEntry) -> str:
    since = entry.failing_since.timestamp() if entry.failing_since else 0
    return f"quarantined.{entry.failures}.{since}"


def _resolution(item: Mapping[str, Any], now: MutationSummary) -> Resolution:
    """Return the frozen resolution of an item, with the state in which it was shown."""
    result = opened(item.get("result"))
    return Resolution(
        mutation=replace(now, state=item["state"]),
        kind=ResolutionKind(item["act"]),
        result=None if result is None else GivenResult(**result),
        evidence=opened(item.get("evidence")),
    )


def _mutation_ids(items: Sequence[Mapping[str, Any]]) -> list[UUID]:
    return [UUID(item["subject"]) for item in items]


def _gone(items: Sequence[Mapping[str, Any]], known: Mapping[str, Any]) -> dict[str, str]:
    missing = (item["subject"] for item in items if item["subject"] not in known)
    return {subject: f"There is no mutation {subject} any more. Nothing was changed." for subject in missing}


def _described(selection: MutationSelection) -> dict[str, Any]:
    if selection.ids:
        return {"ids": len(selection.ids)}
    if selection.incident is not None:
        return {"incident": selection.incident}
    return {"filter": _plain(asdict(selection.only or MutationFilter()))}


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields as JSON."""
    return {
        name: each if isinstance(each, str | int | float | bool | list | dict) else str(each)
        for name, each in value.items()
        if each not in (None, ())
    }


def _preview(row: BulkPreviewRow, now: datetime) -> BulkPreview:
    return BulkPreview(
        id=row.id,
        act=BulkAct(row.act),
        status=_status(row, now),
        created_by=row.created_by,
        created_at=row.created_at,
        expires_at=row.expires_at,
        workflows=tuple(row.workflows),
        request=row.request,
        count=row.item_count,
        items=tuple(
            PreviewItem(
                subject=item["subject"],
                state=item["state"],
                workflow=item["workflow"],
                headline=item["headline"],
                act=item["act"],
                problem=row.refused.get(item["subject"]),
            )
            for item in row.items
        ),
        left_out=row.left_out,
        reason=row.reason,
        committed_by=row.committed_by,
        committed_at=row.committed_at,
        finished_at=row.finished_at,
        done=row.done_count,
        updated=tuple(row.updated),
        refused=row.refused,
    )


def _status(row: BulkPreviewRow, now: datetime) -> str:
    if row.discarded_at is not None:
        return "discarded"
    if row.committed_at is not None:
        return "running" if row.finished_at is None else "finished"
    return "expired" if row.expires_at <= now else "open"
