"""The shown status, for every combination of the operator's wish and the system's blocks."""

from itertools import combinations

import pytest

from pipeline.domain.workflows import CLEARED_BY_RESUME, BlockKind, DesiredStatus, WorkflowStatus, workflow_status

A, I, R = BlockKind.APPROVAL, BlockKind.INTERNAL, BlockKind.RECONCILIATION  # noqa: E741 - letters of a table

#: What an active workflow shows, by the kinds of its open blocks.
SHOWN: dict[frozenset[BlockKind], str] = {
    frozenset(): "active",
    frozenset({R}): "paused",
    frozenset({A}): "error",
    frozenset({I}): "error",
    frozenset({A, I}): "error",
    frozenset({A, R}): "error",
    frozenset({I, R}): "error",
    frozenset({A, I, R}): "error",
}


def test_the_table_covers_every_set_of_blocks() -> None:
    assert set(SHOWN) == {frozenset(chosen) for size in range(4) for chosen in combinations(BlockKind, size)}


@pytest.mark.parametrize(("blocks", "shown"), SHOWN.items(), ids=lambda value: "+".join(sorted(value)) or "none")
def test_a_workflow_shows_what_needs_an_operator_before_what_the_background_works_on(
    blocks: frozenset[BlockKind], shown: str
) -> None:
    assert workflow_status(DesiredStatus.ACTIVE, blocks) is WorkflowStatus(shown)


@pytest.mark.parametrize("blocks", SHOWN, ids=lambda value: "+".join(sorted(value)) or "none")
def test_an_operators_pause_wins_over_every_block(blocks: frozenset[BlockKind]) -> None:
    assert workflow_status(DesiredStatus.PAUSED, blocks) is WorkflowStatus.PAUSED


def test_the_same_block_twice_shows_what_it_shows_once() -> None:
    assert workflow_status(DesiredStatus.ACTIVE, iter([R, R])) is WorkflowStatus.PAUSED
    assert workflow_status(DesiredStatus.ACTIVE, [R, A, R]) is WorkflowStatus.ERROR


def test_resume_lifts_everything_but_an_unknown_outcome() -> None:
    assert set(BlockKind) - CLEARED_BY_RESUME == {BlockKind.RECONCILIATION}
