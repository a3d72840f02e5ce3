"""Write the SQL that makes the roles of an installation and gives each the rights that it needs.

Nothing here connects. A database administrator runs the script again after each migration: it brings every right to
what this version of the code needs, and takes the others away.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.domain.errors import InvalidInputError
from pipeline.store.functions import AUDIT_ROW_HASH, LINK_HASH, NEXT_EVENT_ID, PUBLISH, ROUTES, signature
from pipeline.store.schema import SCHEMA, metadata

_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")


def _columns(name: str) -> list[str]:
    return [column.name for column in metadata.tables[f"{SCHEMA}.{name}"].columns]


#: Secrets of callers of the HTTP API, as hashes. Only the process that serves the API needs them.
_SECRETS = ("access_tokens", "logins")
_SECRET_COLUMN = "secret_hash"  # noqa: S105 - the name of a column
_OF_API = (*_SECRETS, "api_requests", "saved_views", "bulk_previews", "proposals")
_EVERY_TABLE = tuple(sorted(table.name for table in metadata.tables.values()))
#: No role but the owner's chooses the number and the time of an act.
_GIVEN_OF_AUDIT = tuple(each for each in _columns("audit") if each not in {"id", "at"})
#: A rename moves events. No role rewrites a payload: ``pipeline.publish`` does, as long as no run has seen it.
_MOVED_OF_EVENTS = ("workflow", "topic")


@dataclass(frozen=True, slots=True)
class DatabaseRole:
    """A role, what it is for, and its rights: each a privilege and what it is on."""

    does: str
    rights: Sequence[tuple[str, str]] = ()


def _on_tables(privilege: str, names: Iterable[str]) -> tuple[str, str]:
    return privilege, ", ".join(f"{SCHEMA}.{name}" for name in names)


def _on_columns(privilege: str, table: str, columns: Iterable[str]) -> tuple[str, str]:
    return f"{privilege} ({', '.join(columns)})", f"{SCHEMA}.{table}"


_READ = (("SELECT", f"{SCHEMA}.alembic_version"), ("EXECUTE", f"FUNCTION {SCHEMA}.oldest_compatible_code()"))
_CLOCK = ("EXECUTE", f"FUNCTION {SCHEMA}.clock()")
#: The doctor verifies the audit.
_VERIFY = tuple(("EXECUTE", signature(function)) for function in (AUDIT_ROW_HASH, LINK_HASH))

OWNER = "owner"
ROLES: Mapping[str, DatabaseRole] = {
    OWNER: DatabaseRole("owns the schema and migrates it; nothing else runs as this role"),
    "worker": DatabaseRole(
        "runs workers, beat and the ingest of streams",
        (
            *_READ,
            ("EXECUTE", f"ALL FUNCTIONS IN SCHEMA {SCHEMA}"),
            ("USAGE, SELECT", f"SEQUENCE {SCHEMA}.event_ids"),
            _on_tables("SELECT", (name for name in _EVERY_TABLE if name not in _SECRETS)),
            _on_tables(
                "INSERT",
                (
                    *("workflows", "topics", "renames", "handlers", "subscriptions", "operations", "workers"),
                    *("events", "deliveries", "sessions", "runs", "mutations", "blocks", "breakers"),
                    *("maintenance_tasks", "sweeps", "cursors", "samples", "notices", "archive"),
                ),
            ),
            _on_columns("INSERT", "audit", _GIVEN_OF_AUDIT),
            _on_tables(
                "UPDATE",
                (
                    *("workflows", "topics", "renames", "handlers", "subscriptions", "operations", "workers"),
                    *("deliveries", "sessions", "runs", "mutations", "blocks", "breakers"),
                    *("maintenance_tasks", "sweeps", "cursors"),
                ),
            ),
            _on_columns("UPDATE", "events", _MOVED_OF_EVENTS),
            _on_tables(
                "DELETE",
                (
                    *("workflows", "renames", "subscriptions", "workers", "samples", "notices"),
                    *("events", "deliveries", "sessions"),
                ),
            ),
        ),
    ),
    "publisher": DatabaseRole(
        "publishes events in transactions of its own, and reads no payload",
        (
            ("EXECUTE", signature(PUBLISH)),
            _on_columns("SELECT", "workflows", ("name", "codec_secret")),  # which is sealed
            _on_tables("SELECT", ("topics", "renames")),
        ),
    ),
    "operator": DatabaseRole(
        "serves the HTTP API and the console, and runs the commands that read, decide, switch and publish",
        (
            *_READ,
            *(("EXECUTE", signature(function)) for function in (PUBLISH, ROUTES, NEXT_EVENT_ID)),
            _CLOCK,
            *_VERIFY,
            ("EXECUTE", f"FUNCTION {SCHEMA}.uuid7()"),
            ("EXECUTE", f"FUNCTION {SCHEMA}.handler_facts(text[], boolean)"),
            ("SELECT", f"SEQUENCE {SCHEMA}.event_ids"),
            _on_tables("SELECT", _EVERY_TABLE),
            _on_tables("INSERT", (*_OF_API, "sessions", "blocks", "breakers", "maintenance_tasks")),
            _on_columns("INSERT", "audit", _GIVEN_OF_AUDIT),
            _on_tables(
                "UPDATE",
                (
                    *_OF_API,
                    *("workflows", "handlers", "deliveries", "sessions", "runs", "mutations", "blocks"),
                    *("breakers", "maintenance_tasks"),
                ),
            ),
            _on_tables("DELETE", ("logins", "api_requests", "saved_views", "bulk_previews")),
        ),
    ),
    "viewer": DatabaseRole(
        "reads lists, the inbox, payloads and the audit, and changes nothing",
        (
            *_READ,
            _CLOCK,
            *_VERIFY,
            ("EXECUTE", f"FUNCTION {SCHEMA}.handler_facts(text[], boolean)"),
            ("SELECT", f"SEQUENCE {SCHEMA}.event_ids"),
            _on_tables("SELECT", (name for name in _EVERY_TABLE if name not in _SECRETS)),
            *(
                _on_columns(
                    "SELECT",
                    name,
                    (each for each in _columns(name) if each != _SECRET_COLUMN),
                )
                for name in _SECRETS
            ),
        ),
    ),
}

_HEADER = """\
-- The roles of one installation, and their rights. Run by a superuser, again after each migration:
--   pipeline db roles | psql -v ON_ERROR_STOP=1 DATABASE_URL
-- A login becomes a member of the role whose work it does:
--   CREATE ROLE shop LOGIN PASSWORD '...' IN ROLE {prefix}_publisher;
-- The login that migrates creates everything as the owner:
--   CREATE ROLE deployer LOGIN PASSWORD '...' IN ROLE {prefix}_owner;
--   ALTER ROLE deployer SET role = '{prefix}_owner';
"""

_CREATE = """\
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN
    CREATE ROLE {role} NOLOGIN;
  END IF;
END $$;
COMMENT ON ROLE {role} IS '{does}';
"""

#: A sequence of an identity column follows its table. In Postgres 14 a generated column depends on its own table.
_OWN = """\
DO $$
DECLARE
  found record;
BEGIN
  FOR found IN
    SELECT format('SCHEMA %I', nspname) AS what FROM pg_namespace
    WHERE nspname = '{schema}' AND nspowner <> '{owner}'::regrole
    UNION ALL
    SELECT format(CASE relkind WHEN 'S' THEN 'SEQUENCE %s' ELSE 'TABLE %s' END, c.oid::regclass)
    FROM pg_class c WHERE relnamespace = '{schema}'::regnamespace AND relkind IN ('r', 'S')
      AND relowner <> '{owner}'::regrole
      AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
        AND d.objsubid = 0 AND d.deptype IN ('a', 'i'))
    UNION ALL
    SELECT format('ROUTINE %s', oid::regprocedure) FROM pg_proc
    WHERE pronamespace = '{schema}'::regnamespace AND proowner <> '{owner}'::regrole
  LOOP
    EXECUTE format('ALTER %s OWNER TO {owner}', found.what);
  END LOOP;
END $$;
"""


def roles_sql(prefix: str = SCHEMA) -> str:
    """Return the SQL that makes the roles, in one transaction. Their names begin with ``prefix``."""
    if not _NAME.fullmatch(prefix):
        raise InvalidInputError(
            f"The roles cannot be named after {prefix!r}; expected lowercase letters, digits and underscores, a letter "
            "first, at most 41 of them."
        )
    names = {name: f"{prefix}_{name}" for name in ROLES}
    owner = names[OWNER]
    others = ", ".join(["PUBLIC", *(name for name in names.values() if name != owner)])
    lines = [_HEADER.format(prefix=prefix), "BEGIN;\n"]
    lines += [_CREATE.format(role=names[name], does=role.does) for name, role in ROLES.items()]
    lines += [_OWN.format(schema=SCHEMA, owner=owner)]
    lines += [
        f"REVOKE ALL ON {what} FROM {others};"
        for what in (
            f"SCHEMA {SCHEMA}",
            *(f"ALL {kind} IN SCHEMA {SCHEMA}" for kind in ("TABLES", "SEQUENCES", "FUNCTIONS")),
        )
    ]
    lines += [f"ALTER DEFAULT PRIVILEGES FOR ROLE {owner} REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;\n"]
    for name, role in ROLES.items():
        if name != OWNER:
            lines += [f"-- {names[name]} {role.does}", f"GRANT USAGE ON SCHEMA {SCHEMA} TO {names[name]};"]
            lines += [f"GRANT {privilege} ON {what} TO {names[name]};" for privilege, what in role.rights]
            lines += [""]
    return "\n".join([*lines, "COMMIT;", ""])
