"""Let new names of a workflow, its topics and its handlers take the place of the former ones.

A rename moves rows and makes none: a handler keeps its id, its uid and its state, a topic keeps its uid and its events,
a workflow keeps its runs and its ledger. So idempotency keys stay the same, and nothing that waits is left behind. Each
move is in the audit. What older code and publishers still call by a former name is known by ``pipeline.renames``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.domain.errors import InvalidInputError
from pipeline.domain.renames import NameKind, Rename, declared_renames, reverted_renames
from pipeline.domain.values import Actor, WorkflowSpec
from pipeline.store.database import Transaction
from pipeline.store.reads import work
from pipeline.store.writes import renames as rename_store
from pipeline.transitions import audit

DEPLOYMENT = Actor(name="deployment", reason="the code declares the name as renamed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRenames:
    """What the registration of a declaration renames."""

    stored_as: str  #: the name under which the workflow is stored now
    name: str  #: the name that the code declares
    known: tuple[Rename, ...] = ()  #: of topics and handlers, moved or moved before
    moves: tuple[Rename, ...] = ()  #: of those, what is still to be moved

    @property
    def is_workflow_renamed(self) -> bool:
        return self.stored_as != self.name

    def names(self, kind: NameKind) -> Mapping[str, str]:
        """Lead from the former names that are moved to the new ones."""
        return {rename.former: rename.name for rename in self.moves if rename.kind is kind}

    @property
    def everything(self) -> list[Rename]:
        """What is to be moved, the workflow itself first."""
        whole = [Rename(kind=NameKind.WORKFLOW, former=self.stored_as, name=self.name)]
        return [*(whole if self.is_workflow_renamed else []), *self.moves]

    @property
    def descriptions(self) -> tuple[str, ...]:
        """What is to be moved, for the log."""
        return tuple(f"the {rename.kind} {rename.former!r} to {rename.name!r}" for rename in self.everything)


def plan(tx: Transaction, spec: WorkflowSpec, stored_as: str) -> PlannedRenames:
    """Find what the registration of this declaration would move. ``stored_as`` is what ``stored_workflow`` returns.

    Refused if a former and a new name both exist and work waits under the former one: the two have done different work
    under different keys, so one cannot become the other.
    """
    handlers = {row.name for row in work.handlers(tx, stored_as)}
    topics = {row.name for row in work.topics(tx, stored_as)}
    reverted = [
        *_reverted(tx, NameKind.TOPIC, stored_as, {topic.name for topic in spec.topics}, topics),
        *_reverted(tx, NameKind.HANDLER, stored_as, {each.name for each in spec.handlers}, handlers),
    ]
    known = [*declared_renames(spec), *reverted]
    existing = {NameKind.HANDLER: handlers, NameKind.TOPIC: topics}
    moves = [rename for rename in known if rename.former in existing[rename.kind]]
    for rename in moves:
        if rename.name in existing[rename.kind]:
            _refuse_two_with_work(tx, stored_as, rename)
    moved = tuple(rename for rename in moves if rename.name not in existing[rename.kind])
    return PlannedRenames(stored_as=stored_as, name=spec.name, known=tuple(known), moves=moved)


def waiting_events(tx: Transaction, workflow: str, rename: Rename) -> int:
    """How many events wait under a former name. ``workflow`` is the name under which the workflow is stored."""
    return tx.one(rename_store.OPEN_EVENTS[rename.kind], workflow=workflow, former=rename.former).number


def move_work(tx: Transaction, planned: PlannedRenames) -> None:
    """Move runs, ledger, blocks and deliveries to new names. Called under the workflow's lock.

    Workers that choose inputs from a renamed topic lose their runs; other workers prepare them again.
    """
    topics = planned.names(NameKind.TOPIC)
    if topics:
        tx.all(rename_store.TAKE_PREPARING_RUNS, workflow=planned.stored_as, topics=list(topics))
    if planned.is_workflow_renamed:
        names = {"former": planned.stored_as, "name": planned.name}
        tx.execute(rename_store.COPY_WORKFLOW, **names)
        tx.all(rename_store.LOCK_RUNS, former=planned.stored_as)
        tx.execute(rename_store.MOVE_RUNS, **names)
        tx.all(rename_store.LOCK_MUTATIONS, former=planned.stored_as)
        tx.execute(rename_store.MOVE_MUTATIONS, **names)
        tx.execute(rename_store.MOVE_BLOCKS, **names)
    for former, name in topics.items():
        tx.execute(rename_store.MOVE_DELIVERIES, workflow=planned.stored_as, former=former, name=name)


def move_names(tx: Transaction, planned: PlannedRenames) -> None:
    """Move everything else: handlers, topics, events and the rest. Called after deliveries were locked."""
    if planned.is_workflow_renamed:
        names = {"former": planned.stored_as, "name": planned.name}
        tx.execute(rename_store.MOVE_HANDLERS, **names)
        moved = {what: tx.execute(statement, **names) for what, statement in rename_store.MOVE_REST.items()}
        tx.execute(rename_store.DELETE_WORKFLOW, former=planned.stored_as)
        _record(tx, planned.name, Rename(kind=NameKind.WORKFLOW, **names), moved["events"])
    for rename in planned.moves:
        where = {"workflow": planned.name, "former": rename.former, "name": rename.name}
        if rename.kind is NameKind.HANDLER:
            moved_events = waiting_events(tx, planned.name, rename)
            tx.execute(rename_store.RENAME_HANDLER, **where)
        else:
            for statement in rename_store.RENAME_TOPIC:
                tx.execute(statement, **where)
            moved_events = tx.execute(rename_store.MOVE_EVENTS, **where)
        _record(tx, planned.name, rename, moved_events)


def save(tx: Transaction, planned: PlannedRenames, spec: WorkflowSpec, *, is_new_code: bool) -> None:
    """Remember which former names mean which present ones. New code ends what it does not declare any more."""
    known = [(planned.name, rename) for rename in planned.known]
    if spec.renamed_from:
        known.append(("", Rename(kind=NameKind.WORKFLOW, former=spec.renamed_from, name=spec.name)))
    if is_new_code:
        kept = [f"{rename.kind}\x1f{rename.former}" for _, rename in known]
        tx.execute(rename_store.FORGET_RENAMES, workflow=planned.name, stored_as=planned.stored_as, kept=kept)
    for workflow, rename in known:
        names = {"kind": rename.kind, "workflow": workflow, "name": rename.name}
        tx.execute(rename_store.FORGET_FORMER, **names)
        tx.execute(rename_store.FOLLOW_RENAMES, **names, former=rename.former)
        tx.execute(rename_store.SAVE_RENAME, **names, former=rename.former)


def stored_workflow(tx: Transaction, spec: WorkflowSpec) -> str:
    """Return the name under which the workflow of this declaration is stored: its own, or its former one."""
    if not spec.renamed_from or work.workflow(tx, spec.renamed_from) is None:
        return spec.name
    if work.workflow(tx, spec.name) is None:
        return spec.renamed_from
    whole = Rename(kind=NameKind.WORKFLOW, former=spec.renamed_from, name=spec.name)
    waiting = waiting_events(tx, spec.renamed_from, whole)
    if waiting:
        raise InvalidInputError(
            f"Workflow {spec.name!r} is declared as renamed from {spec.renamed_from!r}, and both exist; "
            f"{waiting} events wait in {spec.renamed_from!r}. Nothing was moved. Run the code of both until no "
            "event waits there, or leave renamed_from out."
        )
    return spec.name


def _reverted(
    tx: Transaction, kind: NameKind, workflow: str, declared: set[str], existing: set[str]
) -> Sequence[Rename]:
    return reverted_renames(kind, sorted(declared), existing, work.present_names(tx, kind, workflow))


def _refuse_two_with_work(tx: Transaction, workflow: str, rename: Rename) -> None:
    waiting = waiting_events(tx, workflow, rename)
    if waiting:
        raise InvalidInputError(
            f"The {rename.kind} {rename.name!r} of workflow {workflow!r} is declared as renamed from "
            f"{rename.former!r}, and both exist; {waiting} events wait for {rename.former!r}. Nothing was moved. "
            "Declare both until no event waits there, or leave renamed_from out."
        )


def _record(tx: Transaction, workflow: str, rename: Rename, moved: int) -> None:
    evidence = {"kind": str(rename.kind), "from": rename.former, "to": rename.name, "events": moved}
    by = Actor(name=DEPLOYMENT.name, reason=DEPLOYMENT.reason, evidence=evidence)
    audit.record(tx, by, f"{rename.kind}.rename", workflow=workflow)
    tx.log_on_commit(
        "workflow.renamed", workflow=workflow, kind=rename.kind, former=rename.former, to=rename.name, events=moved
    )
