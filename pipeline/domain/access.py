"""Decide what a caller of the API and the console may do."""

from enum import StrEnum


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
