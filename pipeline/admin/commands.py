"""The exact commands that people are told to type. Written once, quoted for a shell."""

import shlex
from uuid import UUID

#: Where a person puts their own words.
REASON_OPTION = '-m "why"'


def show_run(run_id: UUID | str) -> str:
    """Look at a run."""
    return f"pipeline runs {run_id}"


def show_workflow(workflow: str) -> str:
    """Look at a workflow."""
    return f"pipeline workflows {shlex.quote(workflow)}"


def show_mutation(mutation_id: UUID | str) -> str:
    """Look at a mutation."""
    return f"pipeline mutations {mutation_id}"


def resolve(mutation_id: UUID | str, *, can_try_again: bool) -> tuple[str, ...]:
    """The answers a person can give."""
    answers = ("happened", "did_not_happen", "skip", *(("try_again",) if can_try_again else ()))
    return tuple(f"pipeline resolve {answer} {mutation_id} {REASON_OPTION}" for answer in answers)


def approve_or_reject(mutation_id: UUID | str) -> tuple[str, ...]:
    """Allow a request, or refuse it."""
    return f"pipeline approve {mutation_id} {REASON_OPTION}", f"pipeline reject {mutation_id} {REASON_OPTION}"


def acknowledge(mutation_id: UUID | str) -> str:
    """Say that a late effect was dealt with."""
    return f"pipeline acknowledge {mutation_id} {REASON_OPTION}"


def pause(workflow: str) -> str:
    """Start nothing of a workflow."""
    return f"pipeline pause {shlex.quote(workflow)} {REASON_OPTION}"


def resume(workflow: str) -> str:
    """Let a workflow go on."""
    return f"pipeline resume {shlex.quote(workflow)} {REASON_OPTION}"


def exit_maintenance(workflow: str) -> str:
    """Say that the code was mended."""
    return f"pipeline maintenance exit {shlex.quote(workflow)} {REASON_OPTION}"


def quarantine(verb: str, workflow: str, handler: str, *, waiting: bool = False) -> str:
    """Look at what was set aside for a handler (or waits for it), hand it back, or go on without it."""
    which = f"--workflow {shlex.quote(workflow)} --handler {shlex.quote(handler)}" + (" --waiting" if waiting else "")
    return f"pipeline quarantine {verb} {which}" + ("" if verb == "list" else f" {REASON_OPTION}")


def close_breaker(connector: str, operation: str) -> str:
    """Let mutations of an operation go on."""
    return f"pipeline breaker close {shlex.quote(f'{connector}.{operation}')} {REASON_OPTION}"
