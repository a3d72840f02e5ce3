"""What a role may do, and which rights a group has."""

import pytest

from pipeline.domain.access import Rights, Role, rights_of, role_rules
from pipeline.domain.errors import InvalidInputError


def test_a_role_covers_what_is_below_it_and_a_publisher_only_publishes() -> None:
    covered = {role: [str(needed) for needed in Role if role.covers(needed)] for role in Role}
    assert covered == {
        Role.VIEWER: ["viewer"],
        Role.PUBLISHER: ["publisher"],
        Role.OPERATOR: ["viewer", "publisher", "operator"],
        Role.ADMIN: ["viewer", "publisher", "operator", "admin"],
    }


@pytest.mark.parametrize(
    ("given", "is_included"),
    [
        (Rights(role=Role.VIEWER, workflows=frozenset({"shop"})), True),
        (Rights(role=Role.OPERATOR, can_see_payloads=True, workflows=frozenset({"shop", "mail"})), True),
        (Rights(role=Role.ADMIN, workflows=frozenset({"shop"})), False),
        (Rights(role=Role.VIEWER, workflows=frozenset({"shop", "billing"})), False),
        (Rights(role=Role.VIEWER), False),
    ],
)
def test_rights_include_only_what_is_not_wider(given: Rights, is_included: bool) -> None:
    holder = Rights(role=Role.OPERATOR, can_see_payloads=True, workflows=frozenset({"shop", "mail"}))
    assert holder.includes(given) is is_included


def test_rights_without_payloads_do_not_include_payloads() -> None:
    assert not Rights(role=Role.ADMIN).includes(Rights(role=Role.VIEWER, can_see_payloads=True))
    assert Rights(role=Role.ADMIN).includes(Rights(role=Role.ADMIN))


def test_the_first_rule_that_names_a_group_gives_the_rights() -> None:
    rules = role_rules("oncall=operator+payloads, shop=admin+payloads@shop; mail ,*=viewer,")
    assert rights_of(["shop", "oncall"], rules) == Rights(role=Role.OPERATOR, can_see_payloads=True)
    assert rights_of(["shop"], rules) == Rights(
        role=Role.ADMIN, can_see_payloads=True, workflows=frozenset({"shop", "mail"})
    )
    assert rights_of([], rules) == Rights(role=Role.VIEWER)
    assert rights_of(["others"], rules[:2]) is None


@pytest.mark.parametrize("text", ["oncall", "oncall=boss", "=viewer", "a=viewer+all", "a=viewer@"])
def test_a_rule_without_a_group_or_a_known_role_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="roles: viewer, publisher, operator, admin"):
        role_rules(text)
