"""Build a release and check everything but the upload: ``python -m tools.release``.

The wheel and the sdist are in ``dist`` afterwards. The first problem of each check is printed; with one, the exit code
is 1. It needs a package index, from which the build backend and the dependencies are installed.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

from packaging.metadata import Metadata
from rich.console import Console

from pipeline.embedded import servers

ROOT = Path(__file__).parents[1]
_PACKAGES = ("pipeline/", "celery_durable_effects/")
_SDIST_ONLY = (
    *("migrations/", "examples/shop/", "celeryconfig.py"),
    *("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"),
)
_PROJECT = ("pipeline/project/", "examples/shop/")  #: what `pipeline init` copies, with a test
_STRAY = re.compile(r"(^|/)(tests?|__pycache__|\.[^/]+)(/|$)|(^|/)test_[^/]*\.py$|\.(pyc|orig|rej|bak|log)$")
_SMOKE = "import pipeline, pipeline.celery; [getattr(pipeline, name) for name in pipeline.__all__]"


def version_problem(project: str, changelog: str) -> str:
    """Compare the version of pyproject.toml with the newest one of the changelog."""
    declared = tomllib.loads(project)["project"]["version"]
    newest = re.search(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    if newest is None:
        return f"CHANGELOG.md has no release; expected `## [{declared}] - ` and a date."
    if newest[1] != declared:
        return f"pyproject.toml has version {declared}, CHANGELOG.md {newest[1]}; expected the same."
    return ""


def contents_problem(names: Collection[str], *, is_wheel: bool) -> str:
    """Find the first file that does not belong into a distribution, or one that is missing."""
    roots = _PACKAGES if is_wheel else (*_PACKAGES, *_SDIST_ONLY)
    for name in sorted(names):
        if is_wheel and ".dist-info/" in name:
            continue
        if not name.startswith(roots):
            return f"{name} is in it; expected only {', '.join(roots)}."
        if _STRAY.search(name) and not (name.startswith(_PROJECT) and name.endswith("/test_workflow.py")):
            return f"{name} is in it; expected no tests, caches or hidden files."
    migration = "pipeline/migrations/env.py" if is_wheel else "migrations/env.py"
    missing = sorted({migration, "pipeline/py.typed", "celery_durable_effects/__init__.py"} - set(names))
    return f"{missing[0]} is missing." if missing else ""


def metadata_problem(text: bytes) -> str:
    """Validate the metadata of a distribution, and what an index shows of it."""
    try:
        found = Metadata.from_email(text, validate=True)
    except ExceptionGroup as errors:
        return f"the metadata is not valid: {errors.exceptions[0]}"
    if not (found.description and found.description_content_type == "text/markdown"):
        return "the metadata has no description in Markdown; expected README.md."
    return "" if found.license_expression else "the metadata has no licence; expected an SPDX expression."


def names_in(file: Path) -> list[str]:
    """Return the files of a wheel, or of an sdist without its first folder."""
    if file.suffix == ".whl":
        return zipfile.ZipFile(file).namelist()
    with tarfile.open(file) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    return [name for name in names if name != ".gitignore"]  # which hatchling adds


def metadata_of(file: Path) -> bytes:
    """Return the metadata of a wheel or an sdist."""
    if file.suffix == ".whl":
        archive = zipfile.ZipFile(file)
        return archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA")))
    with tarfile.open(file) as source:
        member = next(
            each for each in source.getmembers() if each.name.count("/") == 1 and each.name.endswith("PKG-INFO")
        )
        content = source.extractfile(member)
        assert content is not None
        return content.read()


def _run(*command: str | Path, **environ: str) -> str:
    """Run a program with none of our settings, and return what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIPELINE_", "PYTHON"))}
    done = subprocess.run(
        command, cwd=tempfile.gettempdir(), env={**kept, **environ}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(target: Path) -> list[Path]:
    """Build the sdist, and the wheel from the sdist, with the time of the last commit."""
    epoch = _run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    _run(sys.executable, "-m", "build", "--outdir", target, ROOT, SOURCE_DATE_EPOCH=epoch)
    return sorted([*target.glob("*.whl"), *target.glob("*.tar.gz")])


def install_problem(file: Path, version: str, database_url: str, home: Path) -> str:
    """Install into an empty environment with the locked dependencies, and try it on an empty database."""
    uv, python = Path(sys.executable).parent / "uv", home / "bin" / "python"
    _run(uv, "venv", "-q", "--python", sys.executable, home)
    _run(
        uv, "pip", "install", "-q", "--python", python, "--require-hashes", "-r", ROOT / "deploy" / "requirements.lock"
    )
    _run(uv, "pip", "install", "-q", "--python", python, "--no-deps", file)
    command = home / "bin" / "pipeline"
    shown = _run(command, "--version")
    if not shown.startswith(f"pipeline {version},"):
        return f"`pipeline --version` prints {shown.strip()!r}; expected {version}."
    _run(python, "-c", _SMOKE)
    _run(command, "--database-url", database_url, "db", "upgrade")
    answer = _run(command, "--database-url", database_url, "doctor")
    return "" if "invariants hold" in answer else f"`pipeline doctor` prints {answer.strip()!r}."


def problems(target: Path) -> Iterator[str]:
    """Build twice, and yield the problems of each check."""
    project, changelog = (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text()
    yield version_problem(project, changelog)
    changed = _run("git", "-C", ROOT, "status", "--porcelain").strip()
    yield changed and f"the working tree has changes, such as {changed.splitlines()[0]!r}; expected none."
    built = build(target)
    with tempfile.TemporaryDirectory() as place:
        for file, again in zip(built, build(Path(place)), strict=True):
            differs = file.read_bytes() != again.read_bytes()
            yield f"{file.name} differs between two builds; expected the same bytes." if differs else ""
    version = tomllib.loads(project)["project"]["version"]
    for file in built:
        for problem in (
            contents_problem(names_in(file), is_wheel=file.suffix == ".whl"),
            metadata_problem(metadata_of(file)),
        ):
            yield problem and f"{file.name}: {problem}"
        with tempfile.TemporaryDirectory() as place, servers.running(Path(place) / "servers", {}) as urls:
            problem = install_problem(file, version, urls.database_url, Path(place) / "venv")
        yield problem and f"{file.name}, installed: {problem}"


def main() -> None:
    """Build, check and report."""
    console, target = Console(highlight=False, soft_wrap=True), ROOT / "dist"
    for old in target.glob("celery_durable_effects-*"):
        old.unlink()
    found = [problem for problem in problems(target) if problem]
    for problem in found:
        console.print(problem)
    built = sorted(target.glob("celery_durable_effects-*"))
    for file in built:
        console.print(f"{file.relative_to(ROOT)}  {file.stat().st_size} bytes  {len(names_in(file))} files")
    console.print("not ready" if found else "ready; what is left is the tag and the upload")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
