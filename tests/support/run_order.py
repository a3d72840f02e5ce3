"""Which test files begin first, so that the processes of a run end at nearly the same time."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
#: Files that take longest, the longest first: none of them begins last and makes the end of the run wait for it.
LONGEST = (
    "chaos/test_chaos.py",
    "acceptance/test_killed_workers.py",
    "console/test_console.py",
    "acceptance/test_cli.py",
    "testing/test_conformance.py",
    "crash/test_commit_boundaries.py",
    "acceptance/test_stragglers.py",
    "acceptance/test_poison_events.py",
    "embedded/test_server_accounts.py",
    "acceptance/test_reconcile_routing.py",
    "store/test_query_plans.py",
    "connectors/test_http_conformance.py",
    "connectors/test_sql_conformance.py",
    "ingest/test_ingest_processes.py",
    "acceptance/test_worker_exits.py",
    "acceptance/test_frozen_processes.py",
    "docs/test_quickstart.py",
    "docs/test_install.py",
    "frameworks/test_django.py",
    "frameworks/test_web.py",
    "acceptance/test_hosted_app.py",
    "acceptance/test_killed_children.py",
    "acceptance/test_unreliable_messages.py",
    "races/test_lock_order_of_transitions.py",
    "connectors/test_email_conformance.py",
    "connectors/test_email.py",
    "cli/test_dev.py",
    "tasks/test_reconcile_queues.py",
    "testing/test_conformance_guide.py",
)
#: Folders with files that wait for real processes: after the longest, before all others.
SLOW = (
    "acceptance",
    "frameworks",
    "connectors",
    "bench",
    "testing",
    "lifecycle",
    "telemetry",
    "cli",
    "embedded",
    "ingest",
    "deploy",
)


def rank(file: Path) -> tuple[int, int]:
    """Return the place of a test file in the order of a run."""
    name = file.relative_to(TESTS)
    if name.as_posix() in LONGEST:
        return 0, LONGEST.index(name.as_posix())
    return 1, SLOW.index(name.parts[0]) if name.parts[0] in SLOW else len(SLOW)
