"""Which code counts as a workflow's own, so that mending it is new code, for every worker of a release alike."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.workflows import registry as module_of_fingerprints
from pipeline.workflows.registry import fingerprint

BILLING = """
from datetime import timedelta
from pipeline import Workflow
{imports}

billing = Workflow("billing")
out = billing.topic("out")

@billing.producer(every=timedelta(hours=1), publishes=[out])
def poll(ctx, state):
    {body}
"""


def written(place: Path, **files: str) -> None:
    """Files by their names, with ``__`` for the slash of a folder."""
    for name, source in files.items():
        file = place / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch() if file.parent != place else None
        file.write_text(source)
    importlib.invalidate_caches()


def changed(place: Path, module: ModuleType, file: str) -> bool:
    """Whether other text in a file is new code to the workflow of a module."""
    before = started(module)
    with (place / file).open("a") as opened:
        opened.write("\nMENDED = True\n")
    return started(module) != before


def started(module: ModuleType, code_version: str = "") -> str:
    """What a worker that starts now makes of the workflow of a module."""
    module_of_fingerprints._digest.cache_clear()
    return fingerprint(module.billing, code_version)


@pytest.mark.parametrize(
    "line",
    [
        "from r93shop.prices import cents",
        "from r93shop import prices",
        "import r93shop.prices",
        "import r93shop.prices as p",
        "from .prices import cents",
        "from . import prices",
        "from .prices import *",
        "from .between import cents",
    ],
)
def test_a_helper_module_counts_however_it_is_imported(place: Path, line: str) -> None:
    written(
        place,
        r93shop__prices="cents = 1",
        r93shop__between="from .prices import cents",
        r93shop__billing=BILLING.format(imports=line, body="return None"),
    )
    module = importlib.import_module("r93shop.billing")
    assert changed(place, module, "r93shop/prices.py")


def test_a_module_that_is_imported_inside_a_function_counts_before_anyone_has_imported_it(place: Path) -> None:
    """The first worker has run the function and the second has not: they are the same release."""
    written(
        place,
        r93late__prices="cents = 1",
        r93late__other="rate = 2",
        r93late__billing=BILLING.format(imports="", body="from r93late.prices import cents"),
    )
    module = importlib.import_module("r93late.billing")
    first = started(module)
    importlib.import_module("r93late.prices")
    importlib.import_module("r93late.other")
    assert started(module) == first
    assert changed(place, module, "r93late/prices.py")


def test_a_helper_beside_a_single_module_counts(place: Path) -> None:
    written(place, r93prices="cents = 1", r93billing=BILLING.format(imports="import r93prices", body="return None"))
    assert changed(place, importlib.import_module("r93billing"), "r93prices.py")


def test_of_installed_packages_only_the_one_of_the_handlers_counts(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / "lib" / "site-packages"
    monkeypatch.syspath_prepend(str(folder))
    written(
        folder,
        r93lib="cents = 1",
        r93app__prices="cents = 1",
        r93app__billing=BILLING.format(imports="import json, r93lib\nfrom . import prices", body="return None"),
    )
    module = importlib.import_module("r93app.billing")
    assert not changed(folder, module, "r93lib.py")
    assert changed(folder, module, "r93app/prices.py")


def test_a_single_module_among_installed_packages_counts_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place / "lib" / "site-packages"
    monkeypatch.syspath_prepend(str(folder))
    written(folder, r93beside="cents = 1", r93single=BILLING.format(imports="import r93beside", body="return None"))
    module = importlib.import_module("r93single")
    assert not changed(folder, module, "r93beside.py")
    assert changed(folder, module, "r93single.py")


def test_another_package_beside_the_workflow_does_not_count(place: Path) -> None:
    written(place, r93ours__inner="n = 1", r93uses=BILLING.format(imports="import r93ours.inner", body="return None"))
    assert not changed(place, importlib.import_module("r93uses"), "r93ours/inner.py")


def test_our_own_code_does_not_count_when_a_handler_is_in_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(place, r93own__prices="n = 1", r93own__billing=BILLING.format(imports="", body="return None"))
    module = importlib.import_module("r93own.billing")
    monkeypatch.setattr(module_of_fingerprints, "_OURS", "r93own")
    assert not changed(place, module, "r93own/prices.py")


def test_a_code_version_decides_what_is_new_code_whatever_the_files(place: Path) -> None:
    written(place, r93named__prices="n = 1", r93named__billing=BILLING.format(imports="", body="return None"))
    module = importlib.import_module("r93named.billing")
    first = started(module, "2.4")
    assert changed(place, module, "r93named/prices.py")
    assert started(module, "2.4") == first
    assert len({first, started(module, "2.5"), started(module)}) == 3


def test_modules_that_import_each_other_and_one_that_cannot_be_read_do_no_harm(place: Path) -> None:
    written(
        place,
        r93round__old="print 'as it was'",
        r93round__prices="import r93round.billing",
        r93round__billing=BILLING.format(imports="import r93round.prices", body="from r93round import old, nowhere"),
    )
    module = importlib.import_module("r93round.billing")
    assert changed(place, module, "r93round/old.py")
    assert changed(place, module, "r93round/prices.py")


def test_a_missing_file_and_a_relative_import_beyond_the_top_do_no_harm(place: Path) -> None:
    written(
        place,
        r93odd__billing=BILLING.format(imports="", body="from ....above import it; import r93odd.folder, r93odd.gone"),
    )
    (place / "r93odd" / "gone.py").symlink_to(place / "nowhere.py")
    (place / "r93odd" / "folder.py").mkdir()
    module = importlib.import_module("r93odd.billing")
    assert started(module) == started(module)
