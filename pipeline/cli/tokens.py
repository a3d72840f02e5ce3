"""Command ``pipeline tokens``: list, create and revoke API tokens."""

from datetime import timedelta
from typing import Annotated
from uuid import UUID

import typer

from pipeline.admin.access import DEFAULT_LIFETIME, MAX_LIFETIME, Access, TokenSummary
from pipeline.cli import common, tables
from pipeline.cli.commands import CommandGroup
from pipeline.domain.access import Rights, Role
from pipeline.domain.errors import InvalidInputError, NotFoundError, quantity

app = CommandGroup(help="API tokens: list them, create one, or revoke one.", no_args_is_help=True)


@app.command("list")
def list_(context: typer.Context, as_json: common.AsJson = False) -> None:
    """List API tokens, newest first, with their rights, expiry and last use."""
    found = Access(context.obj).tokens()
    if as_json:
        common.print_json(found)
    elif found:
        _print_tokens(found)
    else:
        common.print_lines("There is no API token. `pipeline tokens create NAME` creates one.")


@app.command()
def create(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the caller, kept in the audit with every act.")],
    *,
    role: Annotated[Role, typer.Option(help="What the caller may do.")] = Role.VIEWER,
    workflow: Annotated[
        list[str] | None,
        typer.Option(help="Only this workflow; repeatable.", autocompletion=common.complete_workflow),
    ] = None,
    payloads: Annotated[bool, typer.Option("--payloads", help="The caller may see payloads and parameters.")] = False,
    days: Annotated[int, typer.Option(min=1, max=MAX_LIFETIME.days, help="Days until it expires.")] = (
        DEFAULT_LIFETIME.days
    ),
    reason: common.OptionalReason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Create an API token. Its secret is printed once and cannot be read again."""
    rights = Rights(role=role, can_see_payloads=payloads, workflows=frozenset(workflow) if workflow else None)
    made = Access(context.obj).create_token(name, rights, common.actor(by, reason), lifetime=timedelta(days=days))
    if as_json:
        common.print_json(made)
        return
    common.print_lines(
        made.secret,
        f"This is shown once. {name} is {role} until {common.format_time(made.token.expires_at)}; "
        f"`pipeline tokens revoke {made.token.id}` ends it.",
    )


@app.command()
def revoke(
    context: typer.Context,
    token: Annotated[str, typer.Argument(help="Id of the token, or its begin, as in the list.")],
    reason: common.OptionalReason = "",
    by: common.By = "",
    as_json: common.AsJson = False,
) -> None:
    """Revoke an API token, and end the logins that were opened with it."""
    access = Access(context.obj)
    token_id = _token_id(access, token)
    is_changed = access.revoke_token(token_id, common.actor(by, reason))
    if as_json:
        common.print_json({"id": token_id, "is_changed": is_changed})
    else:
        common.print_lines(f"{token_id} is revoked." if is_changed else f"{token_id} was revoked already.")


def _token_id(access: Access, text: str) -> UUID:
    found = [each.id for each in access.tokens() if str(each.id).startswith(text) or each.hint == text]
    if len(found) > 1:
        raise InvalidInputError(f"{text!r} names {len(found)} tokens; expected more of the id.")
    if not found:
        raise NotFoundError("token", text, hint="`pipeline tokens list` lists them.")
    return found[0]


def _print_tokens(found: list[TokenSummary]) -> None:
    tables.print_table(
        quantity(len(found), "token"),
        ("id", "begins", "name", "role", "payloads", "workflows", "expires", "last used", "revoked by"),
        [
            (
                each.id,
                each.hint,
                each.name,
                each.role,
                "yes" if each.can_see_payloads else "no",
                "all" if each.workflows is None else ", ".join(each.workflows),
                common.format_time(each.expires_at),
                common.format_time(each.last_used_at),
                each.revoked_by or "",
            )
            for each in found
        ],
    )
