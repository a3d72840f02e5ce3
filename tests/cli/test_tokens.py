"""Command ``pipeline tokens``."""

from pipeline.admin.access import Access
from pipeline.domain.access import Role
from pipeline.store.database import Database
from tests.cli.conftest import Pipeline
from tests.factories import a_workflow


def test_a_token_is_created_listed_and_revoked(pipeline: Pipeline, db: Database) -> None:
    a_workflow(db)
    assert "There is no API token" in pipeline("tokens", "list").out
    made = pipeline("tokens", "create", "ci", "--role", "publisher", "--workflow", "billing", "--json").json
    identity = Access(db).token_identity(made["secret"])
    assert identity is not None
    assert (identity.name, identity.rights.role, identity.rights.workflows) == (
        "ci",
        Role.PUBLISHER,
        frozenset({"billing"}),
    )
    assert "ci" in pipeline("tokens", "list").out
    assert made["secret"] not in pipeline("tokens", "list", "--json").out
    assert pipeline("tokens", "revoke", made["token"]["hint"]).out == f"{made['token']['id']} is revoked.\n"
    assert pipeline("tokens", "revoke", made["token"]["id"], "--json").json["is_changed"] is False
    assert Access(db).token_identity(made["secret"]) is None
    assert pipeline("tokens", "list", "--json").json[0]["revoked_by"] == "ada"


def test_the_secret_is_printed_once_with_the_command_that_ends_it(pipeline: Pipeline, db: Database) -> None:
    secret, sentence = pipeline("tokens", "create", "ada", "--role", "admin", "--payloads").out.splitlines()
    identity = Access(db).token_identity(secret)
    assert identity is not None
    assert identity.rights.can_see_payloads
    assert f"`pipeline tokens revoke {identity.token_id}` ends it." in sentence


def test_an_unknown_token_and_an_ambiguous_one_are_refused(pipeline: Pipeline, db: Database) -> None:
    for _ in range(2):
        pipeline("tokens", "create", "ci")
    assert "There is no token 'xyz'" in pipeline("tokens", "revoke", "xyz").err
    assert "names 2 tokens" in pipeline("tokens", "revoke", "0").err
    assert all(token.revoked_at is None for token in Access(db).tokens())
