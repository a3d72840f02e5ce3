"""Decide what a declared rename moves. Pure: no I/O.

A workflow, a topic or a handler that is declared with ``renamed_from`` takes the place of the one with the former name.
While newer code declares a rename, older code that has only the former name means the same thing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeline.domain.values import WorkflowSpec


class NameKind(StrEnum):
    """What a name belongs to."""

    WORKFLOW = "workflow"
    TOPIC = "topic"
    HANDLER = "handler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """A name that takes the place of a former one."""

    kind: NameKind
    former: str
    name: str


def declared_renames(spec: WorkflowSpec) -> list[Rename]:
    """The renames of topics and handlers that the code declares."""
    return [
        Rename(kind=kind, former=each.renamed_from, name=each.name)
        for kind, declared in ((NameKind.TOPIC, spec.topics), (NameKind.HANDLER, spec.handlers))
        for each in declared
        if each.renamed_from
    ]


def reverted_renames(
    kind: NameKind, declared: Collection[str], existing: Collection[str], current: Mapping[str, str]
) -> list[Rename]:
    """Renames that newer code takes back: it declares a former name, and the name that replaced it no more.

    ``current`` maps each former name to the present one.
    """
    return [
        Rename(kind=kind, former=current[name], name=name)
        for name in declared
        if name in current and current[name] in existing and current[name] not in declared
    ]


def in_present_names(spec: WorkflowSpec, topics: Mapping[str, str], handlers: Mapping[str, str]) -> WorkflowSpec:
    """The declaration of older code in the names of newer code. Both maps lead from former to present names."""
    return replace(
        spec,
        topics=tuple(replace(topic, name=topics.get(topic.name, topic.name)) for topic in spec.topics),
        handlers=tuple(
            replace(
                each,
                name=handlers.get(each.name, each.name),
                subscribes=tuple(topics.get(topic, topic) for topic in each.subscribes),
                publishes=tuple(topics.get(topic, topic) for topic in each.publishes),
            )
            for each in spec.handlers
        ),
    )


def rename_problem(spec: WorkflowSpec) -> str | None:
    """What is wrong with the renames of a declaration, as text; None if nothing is."""
    if spec.renamed_from == spec.name:
        return f"Workflow {spec.name!r} is declared as renamed from itself; expected its former name"
    declared = {
        NameKind.TOPIC: {topic.name for topic in spec.topics},
        NameKind.HANDLER: {each.name for each in spec.handlers},
    }
    seen: dict[tuple[NameKind, str], str] = {}
    for rename in declared_renames(spec):
        what = f"The {rename.kind} {rename.name!r} of workflow {spec.name!r} is declared as renamed from"
        if rename.former in declared[rename.kind]:
            return f"{what} {rename.former!r}, which is declared as well; expected a name that is gone from the code"
        other = seen.setdefault((rename.kind, rename.former), rename.name)
        if other != rename.name:
            return f"{what} {rename.former!r}, and so is {other!r}; expected one of them"
    return None
