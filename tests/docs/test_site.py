"""The documentation site builds in strict mode, loads nothing from elsewhere, and shows no raw Markdown."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import website

#: Text that Markdown would have turned into something else: a fence, a row of a table, a link.
RAW = re.compile(r"```|^\s*\|.*\|\s*$|\]\([\w./#-]+\)", re.MULTILINE)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of the built site, and what was wrong with it."""
    folder = tmp_path_factory.mktemp("site")
    return folder, website.build_site(folder)


def test_the_site_builds_in_strict_mode_with_every_link_and_anchor(built: tuple[Path, list[str]]) -> None:
    folder, faults = built
    assert faults == []
    assert (folder / "quickstart" / "index.html").exists()


def test_every_page_of_the_documents_is_in_the_site(built: tuple[Path, list[str]], project: Path) -> None:
    folder, _ = built
    pages = len([*(project / "docs").rglob("*.md")]) + sum((project / page).exists() for page in website.OUTSIDE)
    assert len([*folder.rglob("index.html")]) == pages


def test_no_page_shows_raw_markdown(built: tuple[Path, list[str]]) -> None:
    folder, _ = built
    raw = {page.relative_to(folder).as_posix(): found for page in folder.rglob("*.html") if (found := [*_raw(page)])}
    assert raw == {}


def test_no_page_has_a_drawing_that_only_a_script_from_elsewhere_could_make(project: Path) -> None:
    pages = [project / "README.md", *(project / "docs").rglob("*.md")]
    assert [page.name for page in pages if "```mermaid" in page.read_text(encoding="utf-8")] == []


def test_a_page_that_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<script src="//cdn.example.org/a.js"></script><img src="pictures/b.png"><a href="https://example.org">'
        '<pre class="mermaid"></pre>'
    )
    (tmp_path / "b.css").write_text("@font-face { src: url('https://fonts.example.org/c.woff') }")
    assert [*website.foreign_loads(tmp_path)] == [
        ("a.html", "//cdn.example.org/a.js"),
        ("a.html", "mermaid, which the theme takes from a CDN"),
        ("b.css", "https://fonts.example.org/c.woff"),
    ]
    assert website.external_links(tmp_path) == {"https://example.org"}


def _raw(page: Path) -> Iterator[str]:
    """Find raw Markdown in the article of a page, code left out."""
    article = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    text = re.sub(r"<(pre|code)\b.*?</\1>", "", article[0] if article else "", flags=re.DOTALL)
    yield from RAW.findall(re.sub(r"<[^>]+>", "", text))
