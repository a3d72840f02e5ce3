"""The documentation site: the hook that mkdocs.yml names, and the command that builds it, ``python -m tools.website``.

The build is strict: a broken link or anchor, and a page that loads something from elsewhere, is a fault.
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import Abort
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
#: Files outside of docs/ that are pages of the site.
OUTSIDE = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "THREATS.md": "project/threats.md",
    "deploy/README.md": "project/deploy-files.md",
    "examples/README.md": "project/examples.md",
}
#: Where pages go that mkdocs.yml does not name, by the beginning of their path.
SECTIONS = {
    "guides/": "Guides",
    "runbooks/": "Operate/Runbooks",
    "reference/": "Reference",
    "design/adr/": "Design/Decisions",
    "design/": "Design",
    "project/": "Project",
    "": "Start",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#|//)([^)#\s]*)(#[^)\s]*)?\)")
_LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "link": "href",
    "object": "data",
}
_CSS_LOAD = re.compile(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site, print the links that leave it, and say what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.website", description="build the documentation site")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "site", help="the folder of the built site")
    parser.add_argument("--external", action="store_true", help="list the links to other sites")
    options = parser.parse_args(arguments)
    faults = build_site(options.to)
    if options.external:
        sys.stdout.writelines(f"{link}\n" for link in sorted(external_links(options.to)))
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


def build_site(folder: Path) -> list[str]:
    """Build the site into a folder; return every warning of mkdocs and everything that is loaded from elsewhere."""
    warnings = _Warnings()
    logger = logging.getLogger("mkdocs")
    logger.addHandler(warnings)
    try:
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    except Abort as stopped:
        warnings.found.append(str(stopped))
    finally:
        logger.removeHandler(warnings)
    return warnings.found + [f"{page}: loads {address}" for page, address in foreign_loads(folder)]


def foreign_loads(folder: Path) -> Iterator[tuple[str, str]]:
    """Find what a browser would load from another host, by the page or style sheet that asks for it."""
    for path in sorted(folder.rglob("*.html")):
        for tag, attributes in _tags(path):
            address = attributes.get(_LOADS.get(tag, ""), "") or ""
            if re.match(r"(?:https?:)?//", address) and attributes.get("rel") != "canonical":
                yield path.relative_to(folder).as_posix(), address
            if "mermaid" in (attributes.get("class") or "").split():
                yield path.relative_to(folder).as_posix(), "mermaid, which the theme takes from a CDN"
    for path in sorted(folder.rglob("*.css")):
        for address in _CSS_LOAD.findall(path.read_text(encoding="utf-8")):
            yield path.relative_to(folder).as_posix(), address


def external_links(folder: Path) -> set[str]:
    """Every address of another site that a page links to."""
    found = (attributes.get("href") for path in folder.rglob("*.html") for tag, attributes in _tags(path) if tag == "a")
    return {link for link in found if link and re.match(r"https?://", link)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that live outside of docs/, and complete the navigation."""
    for source, place in OUTSIDE.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    named = set(_named(config.nav or []))
    for file in sorted(files.documentation_pages(), key=lambda each: each.src_uri):
        if file.src_uri not in named:
            section = next(name for start, name in SECTIONS.items() if file.src_uri.startswith(start))
            _section(config.nav or [], section.split("/")).append(file.src_uri)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files to their pages; a link to a file that is no page keeps its words only."""
    del config
    source = Path(str(page.file.abs_src_path))

    def rewritten(match: re.Match[str]) -> str:
        mark, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        place = _place((source.parent / target).resolve())
        if place is None or files.get_file_from_path(place) is None:
            return words if place is None and not mark else match[0]
        return f"{mark}[{words}]({os.path.relpath(place, Path(page.file.src_uri).parent)}{anchor})"

    return _LINK.sub(rewritten, markdown)


def _place(path: Path) -> str | None:
    """Where a file of the repository is in the site; None: it is not."""
    if path.is_dir():
        path /= "README.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return OUTSIDE.get(path.relative_to(ROOT).as_posix()) if path.is_relative_to(ROOT) else None


def _named(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
            continue
        for inside in entry.values():
            yield from [inside] if isinstance(inside, str) else _named(inside)


def _section(entries: list[Any], path: list[str]) -> list[Any]:
    """Find the list of a section, or make it at the end."""
    for entry in entries:
        if isinstance(entry, dict) and path[0] in entry:
            found: list[Any] = entry[path[0]]
            return _section(found, path[1:]) if path[1:] else found
    entries.append({path[0]: []})
    return _section(entries, path)


def _tags(path: Path) -> list[tuple[str, dict[str, str | None]]]:
    parser = _Tags()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser.found


class _Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the tag."""
        self.found.append((tag, dict(attrs)))


class _Warnings(logging.Handler):
    """What mkdocs warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the warning."""
        self.found.append(record.getMessage())


if __name__ == "__main__":
    sys.exit(main())
