"""Ask for known vulnerabilities of the locked packages: ``python -m tools.audit``.

Exit code 1 if a package of the image has one. What could not be asked about is printed, so that silence proves nothing.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

LOCK = "deploy/requirements.lock"  #: what runs in production


def summary(report: str) -> tuple[list[str], int]:
    """Return the lines about a report of pip-audit, and the exit code."""
    try:
        packages: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, LookupError):
        return ["The audit of dependencies did not run: its database could not be reached."], 0
    known = [each for each in packages if "skip_reason" not in each]
    lines = [
        f"{each['name']} {each['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'none yet'}"
        for each in known
        for found in each["vulns"]
    ]
    if len(known) < len(packages):
        lines.append(
            f"{len(packages) - len(known)} of {len(packages)} packages were not audited: the database has no answer."
        )
    is_clean = not any(each["vulns"] for each in known)
    if known and is_clean:
        lines.append(f"No known vulnerability in the {len(known)} packages that were audited.")
    return lines, 0 if is_clean else 1


def main() -> None:
    """Audit the lock file of the image."""
    command = [str(Path(sys.executable).parent / "pip-audit"), "-r", LOCK, "--require-hashes", "--disable-pip"]
    options = ["--progress-spinner", "off", "--timeout", "5", "--format", "json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    lines, code = summary(done.stdout)
    Console(highlight=False, soft_wrap=True).print("\n".join(lines))
    sys.exit(code)


if __name__ == "__main__":
    main()
