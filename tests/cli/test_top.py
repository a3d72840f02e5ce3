"""``pipeline top``: one frame, or live."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

from pipeline.store.database import Database
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import a_workflow
from tests.support.wait import wait_for

PIPELINE = Path(sys.executable).parent / "pipeline"
#: Three commands in one process: it is the terminal that counts, and each start costs seconds.
TYPED = """
from pipeline.cli.main import main
for command in (["runs"], ["trace", "order-1"], ["mutations", "--status", "applied"]):
    try:
        main(command)
    except SystemExit as ended:
        assert not ended.code, command
print("the end")
"""
AT_80 = """\
workflow  status  to decide  runs  waiting  oldest  in/s  done/s
billing   paused  1          0/1   0        AA      R.R   R.R

1 item waits for an operator; `pipeline attention` lists the commands"""


def test_one_frame_has_workflows_rates_and_attention_items(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    scenarios.a_done_order(db)
    row = scenarios.an_indeterminate_mutation(db, "order-2")
    frame = pipeline("top", "--once", columns=80)
    title, _, rest = frame.plain().partition("\n\n")
    assert "1 workflow" in title
    assert "is beat running?" in " ".join(frame.out.split()), "no sweep has ever run here"
    assert rest.replace("0.1", "R.R").replace("0.0", "R.R").startswith(AT_80)
    wide = pipeline("top", "--once", columns=140).out
    assert "reconciliation: division by zero" in wide
    output = pipeline("top", "--json").json
    assert output["throughput"]["billing"]["committed"] > 0
    assert output["throughput"]["billing"]["published"] > 0
    assert [item["subject"] for item in output["attention"]] == [f"mutation {row.id}"]
    assert "tick" in output["late_sweeps"]


def test_a_narrow_terminal_cuts_and_folds_no_id(db: Database, database_url: str) -> None:
    a_workflow(db)
    run = scenarios.a_done_order(db)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
    environ |= {"PIPELINE_DATABASE_URL": database_url, "TERM": "xterm", "COLUMNS": "40"}
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", TYPED], env=environ, stdin=theirs, stdout=theirs, timeout=60, check=True)
    seen = b""
    while b"the end" not in seen:
        assert select.select([ours], [], [], 30)[0], seen
        seen += os.read(ours, 65536)
    assert seen.count(str(run.id).encode()) >= 3
    assert seen.count(str(run.mutation_id).encode()) == 2
    assert b"\x1b[" in seen, "in colour"
    os.close(ours)
    os.close(theirs)


def test_the_live_view_ends_on_q_and_leaves_the_terminal_as_it_was(db: Database, database_url: str) -> None:
    a_workflow(db)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
    environ |= {"PIPELINE_DATABASE_URL": database_url, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    ours, theirs = pty.openpty()
    view = subprocess.Popen(
        [PIPELINE, "top", "--every", "0.3"], env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    seen = b""

    def shows() -> bool:
        nonlocal seen
        while select.select([ours], [], [], 0)[0]:
            seen += os.read(ours, 65536)
        return seen.count(b"Nothing waits for an operator.") >= 2

    try:
        wait_for(shows, within=60, why="two frames")
        os.write(ours, b"q")
        assert view.wait(timeout=40) == 0
        shows()
        assert b"\x1b[?1049l" in seen, "the screen is given back"
    finally:
        view.kill()
        view.wait()
        os.close(ours)
        os.close(theirs)
