"""The roles that `pipeline db roles` makes: each does its work on a real database, and is refused everything else."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import uuid4

import psycopg2  # type: ignore[import-untyped]
import pytest
from psycopg2.errors import InsufficientPrivilege  # type: ignore[import-untyped]
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool
from starlette.testclient import TestClient

from pipeline.admin.access import Access
from pipeline.api import Person, Role, create
from pipeline.background.sweeps import DUTIES, Sweeps
from pipeline.cli.main import main
from pipeline.client import DatabaseClient, EventInput, publish
from pipeline.config import Settings
from pipeline.domain.access import Rights
from pipeline.domain.values import Actor
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.store.roles import ROLES, roles_sql
from pipeline.store.schema import metadata
from pipeline.testing import Inline
from tests.support import databases, unanswered_mail_workflow
from tests.support.installation import Installation

PREFIX = f"roles_{os.getpid()}"
FUTURE = (
    "INSERT INTO pipeline.deliveries (event_id, handler_id, topic) SELECT n, 1, 'letters' FROM generate_series(1, 99) n"
)
#: Statements that each role is refused.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "publisher": (
        "SELECT payload FROM pipeline.events",
        "SELECT count(*) FROM pipeline.deliveries",
        "SELECT params FROM pipeline.mutations",
        "SELECT desired FROM pipeline.workflows",
        "COPY pipeline.events TO STDOUT",
        "INSERT INTO pipeline.events (workflow, topic, message_id, payload) VALUES ('shop', 'orders', 'x', '1')",
        "INSERT INTO pipeline.deliveries (event_id, handler_id, topic) VALUES (4711000, 1, 'orders')",
        "UPDATE pipeline.events SET payload = '2'",
        "DELETE FROM pipeline.events",
        "SELECT name FROM pipeline.workflows FOR UPDATE",
        "LOCK TABLE pipeline.topics IN ACCESS EXCLUSIVE MODE",
        "SELECT nextval('pipeline.event_ids')",
        "SELECT pipeline.next_event_id()",
        "SELECT * FROM pipeline.prune_runs(gen_random_uuid(), 1000, interval '0')",
        "SELECT * FROM pipeline.chain_audit(1)",
        "SELECT * FROM pipeline.routes('shop', '{}')",
        "SELECT * FROM pipeline.handler_facts(ARRAY['shop'], true)",
        "CREATE TABLE pipeline.orders ()",
        "CREATE OR REPLACE FUNCTION pipeline.publish(to_workflow text, known_topics jsonb, given_events jsonb, "
        "is_replacing boolean) RETURNS TABLE (id bigint, topic text, message_id text, is_new boolean) "
        "LANGUAGE sql AS 'SELECT 1, '''', '''', true'",
        f"SET ROLE {PREFIX}_owner",
        f"SET ROLE {PREFIX}_worker",
        f"ALTER ROLE {PREFIX}_publisher SUPERUSER",
    ),
    "worker": (
        "SELECT * FROM pipeline.access_tokens",
        "SELECT * FROM pipeline.logins",
        "UPDATE pipeline.events SET payload = '2'",
        "UPDATE pipeline.audit SET actor = 'ada'",
        "INSERT INTO pipeline.audit (at, actor, act) VALUES (now(), 'ada', 'x')",
        "DELETE FROM pipeline.audit",
        "DELETE FROM pipeline.mutations",
        "INSERT INTO pipeline.audit_links (audit_id) VALUES (1)",
        "UPDATE pipeline.audit_links SET hash = 'x'",
        "SET LOCAL pipeline.is_pruning = 'on'; DELETE FROM pipeline.mutations",
        "UPDATE pipeline.alembic_version SET version_num = '9999'",
        "CREATE TABLE pipeline.orders ()",
        "ALTER TABLE pipeline.audit DISABLE TRIGGER ALL",
        "DROP FUNCTION pipeline.publish",
        f"SET ROLE {PREFIX}_owner",
        f"SET ROLE {PREFIX}_operator",
    ),
    "operator": (
        FUTURE,
        "INSERT INTO pipeline.events (workflow, topic, message_id, payload) VALUES ('shop', 'orders', 'x', '1')",
        "INSERT INTO pipeline.runs (workflow, handler_id, session_id) VALUES ('shop', 1, gen_random_uuid())",
        "UPDATE pipeline.events SET payload = '2'",
        "DELETE FROM pipeline.mutations",
        "UPDATE pipeline.audit SET actor = 'ada'",
        "DELETE FROM pipeline.audit",
        "SELECT * FROM pipeline.prune_audit(0, 1000, interval '0')",
        "SELECT * FROM pipeline.chain_audit(1)",
        "UPDATE pipeline.topics SET schema = NULL",
        "UPDATE pipeline.alembic_version SET version_num = '9999'",
        "ALTER TABLE pipeline.audit DISABLE TRIGGER ALL",
        f"SET ROLE {PREFIX}_worker",
    ),
    "viewer": (
        FUTURE,
        "SELECT secret_hash FROM pipeline.access_tokens",
        "SELECT * FROM pipeline.logins",
        "UPDATE pipeline.workflows SET desired = 'paused'",
        "INSERT INTO pipeline.audit (actor, act) VALUES ('ada', 'x')",
        "INSERT INTO pipeline.saved_views (owner, name, page, query) VALUES ('a', 'b', 'c', 'd')",
        "SELECT * FROM pipeline.publish('shop', '[]', '[]', false)",
        "SELECT * FROM pipeline.handler_facts(ARRAY['shop'], true)",
        "SELECT nextval('pipeline.event_ids')",
        f"SET ROLE {PREFIX}_operator",
    ),
}
for _name in ("worker", "publisher", "operator", "viewer"):  # no role but the owner's empties a table
    REFUSED = {**REFUSED, _name: (*REFUSED[_name], *(f"TRUNCATE {table} CASCADE" for table in metadata.tables))}


@pytest.fixture(scope="module")
def logins(installation: Installation) -> Iterator[Mapping[str, str]]:
    """The database as a login of each role, by the name of the role. The script runs twice: it is repeatable."""
    url = make_url(installation.database_url)
    names = {name: f"{PREFIX}_{name}" for name in ROLES}
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for _ in range(2):
            connection.exec_driver_sql(roles_sql(PREFIX).replace("%", "%%"))
        for role in names.values():
            connection.execute(text(f"CREATE ROLE {role}_login LOGIN PASSWORD 'secret' IN ROLE {role}"))
        connection.execute(text(f"ALTER ROLE {names['owner']}_login SET role = '{names['owner']}'"))
    yield {
        name: url.set(username=f"{role}_login", password="secret").render_as_string(hide_password=False)
        for name, role in names.items()
    }
    with engine.connect() as connection:
        connection.execute(text(f"REASSIGN OWNED BY {names['owner']} TO CURRENT_USER"))
        for role in names.values():
            connection.execute(text(f"DROP OWNED BY {role}, {role}_login; DROP ROLE {role}_login, {role}"))


@pytest.fixture
def nodes(installation: Installation) -> Iterator[Installation]:
    """The installation with nothing in it: connections of the test before are gone as well."""
    installation.ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid()"
    )
    installation.begin_anew()
    yield installation
    installation.end_nodes()


@pytest.fixture
def shop(nodes: Installation, logins: Mapping[str, str]) -> Installation:
    """A worker and a beat that connect as the worker's role."""
    nodes.worker(PIPELINE_DATABASE_URL=logins["worker"])
    nodes.beat(PIPELINE_DATABASE_URL=logins["worker"])
    return nodes


@pytest.fixture
def command(
    logins: Mapping[str, str],
    installation: Installation,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """Run a command as a role; return what it printed."""

    def run(role: str, *arguments: str) -> str:
        monkeypatch.setenv("PIPELINE_DATABASE_URL", logins[role])
        monkeypatch.setenv("PIPELINE_BROKER_URL", installation.broker_url)
        monkeypatch.setenv("PIPELINE_WORKFLOWS", "tests.support.unanswered_mail_workflow")
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        output = capsys.readouterr()
        assert not ended.value.code, output.err
        return output.out

    return run


def order(number: int, payload: Any = None) -> EventInput:
    return EventInput(topic="orders", message_id=f"order {number}", payload=payload or {})


def test_workers_and_publishers_run_orders_end_to_end(shop: Installation, logins: Mapping[str, str]) -> None:
    engine = create_engine(logins["publisher"], poolclass=NullPool)
    with engine.begin() as connection:  # SQLAlchemy
        assert publish(connection, "shop", [order(0)]).new == ("order 0",)
        assert publish(connection, "shop", [order(0), order(1)]).repeated == ("order 0",)
    with dbapi(logins["publisher"]) as connection:
        assert len(publish(connection, "shop", [order(n) for n in range(2, 7)]).new) == 5
    connection.close()
    client = DatabaseClient(logins["publisher"])
    assert client.publish("shop", [order(7)]).new == ("order 7",)
    assert client.publish("shop", [order(8), order(9)], replace=True).new == ("order 8", "order 9")
    client.close()
    shop.published += [f"order {n}" for n in range(10)]
    shop.all_done_once()
    assert {node.stop() for node in shop.nodes} == {0}


def test_every_sweep_runs_as_the_worker_s_role(nodes: Installation, logins: Mapping[str, str]) -> None:
    db = Database.connect_unpooled(logins["worker"])
    made = Inline(db, [unanswered_mail_workflow.counter], [unanswered_mail_workflow.mail])
    made.publish(unanswered_mail_workflow.letters, {"to": "ada@example.org"})
    made.run()
    sweeps: Sweeps = made.sweeps
    for duty in DUTIES.values():
        duty.run(sweeps)


def test_a_pending_event_is_replaced_by_a_publisher(nodes: Installation, logins: Mapping[str, str]) -> None:
    register(logins)
    client = DatabaseClient(logins["publisher"])
    letter = EventInput(topic="letters", message_id="1", payload={"to": "ada@example.org"})
    client.publish("counter", [letter])
    assert client.publish("counter", [letter], replace=True).replaced == ("1",)
    client.close()


def test_an_operator_answers_and_a_viewer_reads_on_the_command_line(
    nodes: Installation, logins: Mapping[str, str], command: Callable[..., str]
) -> None:
    register(logins, "ada@example.org", "bob@example.org")
    mutation = ids(nodes)[0]
    command("operator", "resolve", "happened", mutation, "-m", "seen in the outbox", "--no-result")
    command("operator", "pause", "counter", "-m", "lunch")
    command("operator", "resume", "counter")
    command("operator", "publish", "counter", "letters", '{"to": "cy@example.org"}', "--message-id", "cy")
    command("operator", "tokens", "create", "ci", "--role", "viewer")
    assert "ci" in command("operator", "tokens", "list")
    for role in ("operator", "viewer"):
        for arguments in (
            ("attention",),
            ("workflows",),
            ("workflows", "counter"),
            ("events",),
            ("runs",),
            ("mutations", mutation),
            ("trace", mutation),
            ("audit",),
            ("connectors",),
            ("breakers",),
            ("quarantine", "list"),
            ("doctor",),
        ):
            assert command(role, *arguments)
    assert "seen in the outbox" in command("viewer", "audit")


def test_the_api_and_the_console_serve_as_operator_and_as_viewer(
    nodes: Installation, logins: Mapping[str, str]
) -> None:
    register(logins, "ada@example.org")
    v1 = ("attention", "audit", "workflows", "mutations", "events", "runs", "doctor")
    pages = ["/", "/w", "/w/counter", "/runs", "/ledger", "/quarantine", "/audit", "/system", "/connectors"]
    pages += [f"/v1/{name}" for name in v1]
    db = Database.connect(logins["operator"])
    rights = Rights(role=Role.ADMIN, can_see_payloads=True, workflows=None)
    secret = Access(db).create_token("ada", rights, Actor(name="ada")).secret
    with TestClient(create(Settings(database_url=logins["operator"]), database=db)) as client:
        headers = {"Authorization": f"Bearer {secret}"}
        mutation = client.get("/v1/mutations", headers=headers).json()["items"][0]
        done = client.post(f"/v1/mutations/{mutation['id']}/skip", headers=headers, json={"reason": "old"})
        codes = {page: client.get(page, headers=headers).status_code for page in pages}
        assert codes == dict.fromkeys(pages, 200)
        assert done.status_code < 500
    person = Person(name="eve", role=Role.VIEWER, can_see_payloads=True)
    viewer = Database.connect(logins["viewer"])
    with TestClient(
        create(Settings(database_url=logins["viewer"]), database=viewer, identify=lambda _: person)
    ) as client:
        assert {page: client.get(page).status_code for page in pages} == dict.fromkeys(pages, 200)
    db.dispose()
    viewer.dispose()


@pytest.mark.parametrize("role", REFUSED)
def test_a_role_is_refused_the_work_of_others(nodes: Installation, logins: Mapping[str, str], role: str) -> None:
    register(logins)
    connection = dbapi(logins[role])
    for statement in REFUSED[role]:
        assert refusal(connection, statement) is InsufficientPrivilege, f"{role}: {statement}"
    connection.close()


def test_no_trick_lets_a_publisher_do_more_than_publish(  # noqa: PLR0915 - one attack after the other
    nodes: Installation, logins: Mapping[str, str]
) -> None:
    """Names in schemas of its own, a moved clock, and values that only a run or the system gives."""
    register(logins)
    before = nodes.ask("SELECT last_value FROM pipeline.event_ids")[0].last_value
    with nodes.db.transaction() as tx:
        tx.execute(text(f"CREATE SCHEMA tricks AUTHORIZATION {PREFIX}_publisher_login"))
    connection = dbapi(logins["publisher"])
    fail = "LANGUAGE plpgsql AS $$ BEGIN RAISE 'ran as %', current_user; END $$"
    forged = {"id": 4711000, "workflow": "other", "created_at": "2001-01-01", "caused_by": [1]}
    run = {"created_by_run_id": str(uuid4()), "run": str(uuid4())}
    row = json.dumps({"topic": "letters", "message_id": "1", "payload": {}, "n": 0, **forged, **run})
    with connection, connection.cursor() as cursor:
        for where in ("tricks", "pg_temp"):
            cursor.execute(f"CREATE FUNCTION {where}.hashtext(text) RETURNS integer {fail}")
            cursor.execute(f"CREATE FUNCTION {where}.unnest(text[]) RETURNS SETOF text {fail}")
            cursor.execute(f"CREATE FUNCTION {where}.next_event_id() RETURNS bigint {fail}")
            cursor.execute(f"CREATE FUNCTION {where}.same(text, text) RETURNS boolean {fail}")
            cursor.execute(f"CREATE OPERATOR {where}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {where}.same)")
        cursor.execute("CREATE TEMP TABLE events (id bigint); CREATE TEMP TABLE topics (name text)")
        cursor.execute("SET LOCAL search_path = tricks, pg_temp, pipeline, pg_catalog")
        cursor.execute("SET LOCAL pipeline.clock_offset = '-10 years'")
        cursor.execute(
            "SELECT * FROM pipeline.publish('counter', %s, %s, true)",
            ('[{"name": "letters", "schema_digest": ""}]', f"[{row}]"),
        )
        assert len(cursor.fetchall()) == 1
    (event,) = nodes.ask("SELECT *, created_at > now() - interval '1 hour' AS is_now FROM pipeline.events")
    assert before < event.id < 4711000
    assert (event.workflow, event.caused_by, event.created_by_run_id, event.is_now) == ("counter", [], None, True)
    with connection, connection.cursor() as cursor:  # a topic that it did not name, and one that is not there
        for known in ("[]", '[{"name": "x", "schema_digest": ""}]'):
            cursor.execute("SELECT id FROM pipeline.publish('counter', %s, %s, false)", (known, f"[{row}]"))
            assert {found[0] for found in cursor.fetchall()} <= {None}
    connection.close()
    assert len(nodes.ask("SELECT FROM pipeline.events")) == 1
    with nodes.db.transaction() as tx:
        tx.execute(text("DROP SCHEMA tricks CASCADE"))


def test_deliveries_of_future_events_cannot_stop_publishing(nodes: Installation, logins: Mapping[str, str]) -> None:
    register(logins)
    connection = dbapi(logins["publisher"])
    assert refusal(connection, FUTURE) is InsufficientPrivilege
    connection.close()
    client = DatabaseClient(logins["publisher"])
    assert client.publish("counter", [EventInput(topic="letters", message_id="1")]).new == ("1",)
    client.close()


def test_the_owner_s_login_migrates_a_new_database(
    nodes: Installation, logins: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = f"{PREFIX}_owner"
    with databases.empty(nodes.database_url, f"owned_{os.getpid()}") as url:
        admin = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.execute(text(f"CREATE SCHEMA pipeline AUTHORIZATION {owner}"))
            name = connection.engine.url.database
            migrate.upgrade(
                Database.connect_unpooled(str(make_url(logins["owner"]).set(database=name).render_as_string(False)))
            )
            owned = (
                "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = 'pipeline'::regnamespace"
            )
            owners = connection.execute(text(owned))
            assert [*owners.scalars()] == [owner]
            connection.exec_driver_sql(roles_sql(PREFIX).replace("%", "%%"))
        as_worker = Database.connect_unpooled(make_url(logins["worker"]).set(database=name).render_as_string(False))
        migrate.require_current(as_worker)
    migrate.upgrade(Database.connect_unpooled(logins["owner"]))  # nothing to do


def dbapi(url: str) -> Any:
    return psycopg2.connect(make_url(url).set(drivername="postgresql").render_as_string(hide_password=False))


def refusal(connection: Any, statement: str) -> type[Exception] | None:
    """The error of a statement; None: it was not refused."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
    except psycopg2.Error as error:
        return type(error)
    finally:
        connection.rollback()
    return None


def register(logins: Mapping[str, str], *letters: str) -> None:
    """Register a workflow as a worker does, and let it leave the outcome of each letter unknown."""
    db = Database.connect_unpooled(logins["worker"])
    made = Inline(db, [unanswered_mail_workflow.counter], [unanswered_mail_workflow.mail])
    if letters:
        made.publish(unanswered_mail_workflow.letters, *({"to": to} for to in letters))
        made.run()


def ids(installation: Installation) -> list[str]:
    found = installation.ask("SELECT id::text AS id FROM pipeline.mutations ORDER BY 1")
    return [row.id for row in found]
