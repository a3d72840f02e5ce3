"""Where the data of a Postgres that runs under another account can live.

Root starts Postgres under a lesser account, which often cannot enter root's directories. The data then goes
under the system's temporary directory, and a link in the home leads there. Data to which no link leads belongs
to a home that was deleted: it is cleared away, and never taken over by a new home of the same name.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from pipeline.embedded import binaries, processes
from pipeline.embedded.processes import Account, ServersError


def prepare_data_directory(home: Path, account: Account | None) -> Path:
    """The directory for password and data, owned by the account and reachable for it."""
    place = home / "postgres"
    if place.is_dir():
        return place.resolve()
    if place.is_symlink():  # its target was cleaned up with the temporary files
        place.unlink()
    if account is None or _can_enter(home, account):
        place.mkdir(mode=0o700)
        change_owner(place, account)
        return place.resolve()
    target = _temporary_directory(home)
    _remove_leftovers(target, account)
    _remove_abandoned(target.parent, account)
    place.symlink_to(target)  # before there is anything to lead to, so that no sweep takes it for abandoned
    target.mkdir(mode=0o700)
    change_owner(target, account)
    (target / "home").write_text(str(home))
    return target


def remove_data(home: Path) -> None:
    """Delete the home and, where it has one, its place under the temporary directory."""
    place = home / "postgres"
    if place.is_symlink() and place.resolve() == _temporary_directory(home):
        shutil.rmtree(place.resolve(), ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)


def reachable_programs(found: binaries.PostgresPrograms, place: Path, account: Account | None) -> Path:
    """The directory of the programs, copied beside the data when the account cannot reach them.

    Programs in a wheel find their libraries by relative paths, so package and libraries are copied together.
    """
    if account is None or _can_run(found.directory / "initdb", account):
        return found.directory
    if found.wheel_tree is None:
        raise ServersError(
            f"the account {account.name!r}, which runs Postgres because root must not, cannot run the "
            f"programs in {found.directory}: install postgresql on the system or set PIPELINE_DATABASE_URL"
        )
    package = found.wheel_tree.parent
    copies = place / f"programs-{found.major}"
    target = copies / package.name / found.wheel_tree.name
    if not target.exists():
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, copies / libraries.name, dirs_exist_ok=True)
        draft = target.with_name(f".{target.name}.new")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(found.wheel_tree, draft)
        draft.rename(target)
    return target / "bin"


def change_owner(path: Path, account: Account | None) -> None:
    """Make the account the owner; nothing to do when we run everything ourselves."""
    if account is not None:
        os.chown(path, account.uid, account.gid)


def _temporary_directory(home: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]
    return Path(tempfile.gettempdir()).resolve() / f"pipeline-{digest}"


def _remove_leftovers(target: Path, account: Account) -> None:
    """Remove the data of a deleted home. Refuse a directory of another account."""
    if not os.path.lexists(target):
        return
    if not _is_ours(target, account):
        raise ServersError(f"{target} is needed for Postgres's data, and belongs to another account: remove it")
    shutil.rmtree(target)


def _remove_abandoned(directory: Path, account: Account) -> None:
    """Remove the data of homes that are gone: a test run that deletes its home would leave it here forever."""
    for place in directory.glob("pipeline-*"):
        if _is_ours(place, account) and _is_abandoned(place):
            shutil.rmtree(place, ignore_errors=True)


def _is_ours(place: Path, account: Account) -> bool:
    try:
        seen = place.lstat()
    except FileNotFoundError:  # another sweep was faster
        return False
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid in (os.geteuid(), account.uid)


def _is_abandoned(place: Path) -> bool:
    """Whether this is the data of a home that no longer leads here, and no server runs on it."""
    try:
        home = Path((place / "home").read_text())
    except OSError:
        return False
    if (home / "postgres").resolve() == place:
        return False
    claims = (processes.read_pid(claim) for claim in place.glob("*/postmaster.pid"))
    return not any(pid is not None and processes.is_running(pid) for pid in claims)


def _can_enter(directory: Path, account: Account) -> bool:
    return processes.run_as(account, ["/bin/sh", "-c", 'cd "$1"', "sh", directory]).returncode == 0


def _can_run(program: Path, account: Account) -> bool:
    return processes.run_as(account, ["/bin/sh", "-c", '"$1" --version', "sh", program]).returncode == 0
