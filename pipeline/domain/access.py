"""Decide what a caller of the API and the console may do."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from pipeline.domain.errors import InvalidInputError

ROLE_RULES = "GROUP=ROLE, GROUP=ROLE+payloads or GROUP=ROLE@workflow;workflow, separated by commas; * is every group"
_ROLE_RULE = re.compile(r"(?P<group>[^=,]+)=(?P<role>\w+)(?P<payloads>\+payloads)?(?:@(?P<workflows>[^@]+))?")


class Role(StrEnum):
    """What a caller may do. A viewer reads, an operator also acts, an admin also manages access."""

    VIEWER = "viewer"  #: reads everything in scope; payloads only with the right to see them
    PUBLISHER = "publisher"  #: publishes events and reads nothing else
    OPERATOR = "operator"  #: reads, resolves, approves, controls workflows and publishes
    ADMIN = "admin"  #: does everything, and creates and revokes API tokens

    def covers(self, needed: "Role") -> bool:
        """Whether a caller with this role may do what needs the other role."""
        return needed in _COVERED[self]


_COVERED = {
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.PUBLISHER: frozenset({Role.PUBLISHER}),
    Role.OPERATOR: frozenset({Role.VIEWER, Role.PUBLISHER, Role.OPERATOR}),
    Role.ADMIN: frozenset(Role),
}


class LoginSource(StrEnum):
    """By what a person logged in to the console."""

    TOKEN = "token"  # noqa: S105 - a kind, not a secret  #: an API token
    LINK = "link"  #: the one-time link that `pipeline api` prints
    OIDC = "oidc"  #: an OpenID Connect provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """A role, the right to see payloads, and the workflows in scope."""

    role: Role
    can_see_payloads: bool = False
    workflows: frozenset[str] | None = None  #: the only workflows in scope; None: all

    def includes(self, other: "Rights") -> bool:
        """Whether a holder of these rights may give or take away the other ones."""
        return (
            self.role.covers(other.role)
            and (self.can_see_payloads or not other.can_see_payloads)
            and (self.workflows is None or (other.workflows is not None and other.workflows <= self.workflows))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRule:
    """The rights that the members of one group have."""

    group: str
    rights: Rights


def role_rules(text: str) -> tuple[RoleRule, ...]:
    """Read the rules that map groups to rights: ``oncall=operator+payloads,shop=viewer@shop;mail,*=viewer``."""
    return tuple(_role_rule(part.strip()) for part in text.split(",") if part.strip())


def rights_of(groups: Collection[str], rules: Iterable[RoleRule]) -> Rights | None:
    """Return the rights by the first rule that names one of the groups; None: no rule does."""
    return next((rule.rights for rule in rules if rule.group == "*" or rule.group in groups), None)


def _role_rule(text: str) -> RoleRule:
    found = _ROLE_RULE.fullmatch(text)
    if found is None or found["role"] not in set(Role):
        raise InvalidInputError(f"{text!r} maps no group to a role; expected {ROLE_RULES}; roles: {', '.join(Role)}.")
    names = found["workflows"]
    return RoleRule(
        group=found["group"].strip(),
        rights=Rights(
            role=Role(found["role"]),
            can_see_payloads=found["payloads"] is not None,
            workflows=None if names is None else frozenset(name.strip() for name in names.split(";") if name.strip()),
        ),
    )
