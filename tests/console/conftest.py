"""One browser, one worker and one console for the tests of this folder."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from pipeline.embedded import servers
from tests.support.console_shop import ConsoleShop, console_shop

#: One process draws all pages of a context. Otherwise each page starts two, which costs more than the page.
ARGUMENTS = (
    "--process-per-site",
    "--renderer-process-limit=1",
    "--disable-site-isolation-trials",
    "--in-process-gpu",
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = Path(__file__).parent / "axe" / "axe.min.js"
_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's chromium, driven by playwright. It ends with its module: its event loop runs in this thread."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        reason = f"no browser was found, expected one of: {', '.join(_NAMES)}; `make browser` installs it as root"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def shop(
    browser: Browser, embedded: servers.Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConsoleShop]:
    """A shop with a real worker, and the console on it."""
    del browser  # without one nothing needs to start
    with console_shop(embedded.database_url, tmp_path_factory.mktemp("console")) as found:
        yield found


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser, shop: ConsoleShop) -> Iterator[OpenPage]:
    """Open pages of the console as one person, and check afterwards what they asked for and got."""
    asked: list[tuple[str, str]] = []
    errors: list[str] = []
    with ExitStack() as stack:

        def make(path: str = "/", *, person: str = "ada", base: str = "", width: int = 1280, **options: Any) -> Page:
            context = browser.new_context(viewport={"width": width, "height": 860}, **options)
            stack.callback(context.close)
            context.set_default_timeout(20_000)
            context.add_cookies([{"name": "person", "value": person, "url": shop.url}])
            page = context.new_page()
            page.on("request", lambda request: asked.append((base or shop.url, request.url)))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto((base or shop.url) + path)
            return page

        yield make
    others = [url for base, url in asked if urlsplit(url).netloc != urlsplit(base).netloc]
    assert others == [], "a request left the origin"
    assert errors == [], "the script failed"
    assert shop.leaks.paths == [], "a body has a planted secret"
