"""The allowed values in the database are the enums of the code, no more and no less."""

import re
from enum import StrEnum

import pytest

from pipeline.domain.access import LoginSource, Role
from pipeline.domain.acts import BulkAct, ProposedAct
from pipeline.domain.renames import NameKind
from pipeline.domain.states import PHASES, DeliveryStatus, MutationOutcome, MutationStatus, Phase, Resolver, RunStatus
from pipeline.domain.workflows import (
    AfterFailedMutation,
    BlockKind,
    DesiredStatus,
    HandlerKind,
    OnExhausted,
    OnLogicError,
    OnUncertain,
    SessionResult,
)
from pipeline.store.database import Database
from tests.support import schema_catalog

ENUMS: dict[str, type[StrEnum]] = {
    "workflows_desired_known": DesiredStatus,
    "workflows_on_uncertain_known": OnUncertain,
    "workflows_on_logic_error_known": OnLogicError,
    "workflows_on_exhausted_known": OnExhausted,
    "renames_kind_known": NameKind,
    "handlers_kind_known": HandlerKind,
    "handlers_after_failed_mutation_known": AfterFailedMutation,
    "deliveries_status_known": DeliveryStatus,
    "sessions_result_known": SessionResult,
    "runs_phase_known": Phase,
    "runs_status_known": RunStatus,
    "runs_mutation_outcome_known": MutationOutcome,
    "mutations_status_known": MutationStatus,
    "mutations_resolved_by_known": Resolver,
    "blocks_kind_known": BlockKind,
    "bulk_previews_act_known": BulkAct,
    "proposals_act_known": ProposedAct,
    "access_tokens_role_known": Role,
    "logins_role_known": Role,
    "logins_source_known": LoginSource,
}


def rules(db: Database) -> dict[str, str]:
    with db.engine.connect() as connection:
        return schema_catalog.refusals(connection)


def literals(definition: str) -> list[str]:
    return re.findall(r"'([^']*)'::text", definition)


@pytest.mark.parametrize("rule", ENUMS)
def test_a_list_in_the_database_is_exactly_its_enum(db: Database, rule: str) -> None:
    assert literals(rules(db)[rule]) == [member.value for member in ENUMS[rule]]


def test_every_list_in_the_database_has_its_enum(db: Database) -> None:
    assert {name for name in rules(db) if name.endswith("_known")} == set(ENUMS)


def test_every_literal_in_a_constraint_is_a_member_of_an_enum(db: Database) -> None:
    """A constraint that names an impossible status would never refuse anything."""
    spoken = {member.value for enum in ENUMS.values() for member in enum}
    strays = {
        name: unknown
        for name, definition in rules(db).items()
        if "EXECUTE FUNCTION" not in definition and (unknown := set(literals(definition)) - spoken)
    }
    assert strays == {}


def test_the_trigger_that_keeps_phases_growing_has_their_order(db: Database) -> None:
    listed = literals(rules(db)["runs_phase_only_grows"])
    assert listed[: len(PHASES)] == [phase.value for phase in PHASES]
