"""A worker started by the `celery` script in a user's folder finds the modules there."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_celery_script_finds_workflows_in_the_current_folder_as_the_command_line_does(tmp_path: Path) -> None:
    package = tmp_path / "a folder" / "bakery"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "orders.py").write_text('print("the bakery was imported", flush=True)\n')
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PIPELINE_", "PYTHONPATH"))}
    away = {"PIPELINE_DATABASE_URL": "postgresql://127.0.0.1:1/away", "PIPELINE_WORKFLOWS": "bakery.orders"}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "celery"), "-A", "pipeline", "worker", "--pool=solo"],
        env=ours | away,
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ("the bakery was imported" in done.stdout, done.returncode) == (True, 75), done.stderr
