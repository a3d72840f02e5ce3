"""What a role may do."""

from pipeline.domain.access import Role


def test_a_role_covers_what_is_below_it_and_a_publisher_only_publishes() -> None:
    covered = {role: [str(needed) for needed in Role if role.covers(needed)] for role in Role}
    assert covered == {
        Role.VIEWER: ["viewer"],
        Role.PUBLISHER: ["publisher"],
        Role.OPERATOR: ["viewer", "publisher", "operator"],
        Role.ADMIN: ["viewer", "publisher", "operator", "admin"],
    }
