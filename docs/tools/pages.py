"""Hooks of mkdocs: pages of the root and files that pages name are part of the site, and the
navigation is the table of docs/index.md.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# mkdocs takes README.md for the first page, which docs/index.md is.
ROOT_PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
}
SOURCES = {page: name for name, page in ROOT_PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def repository_path(link: str, page: str) -> str:
    """The path below the root of what a page of the site links to."""
    folder = "" if page in SOURCES else posixpath.join("docs", posixpath.dirname(page))
    return posixpath.normpath(posixpath.join(folder, link))


def site_path(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}"


def prose(text: str) -> str:
    return FENCED.sub("", text)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    navigation: list[str | dict[str, list[str]]] = ["index.md"]
    seen = {"index.md"}
    sections = re.split(r"^## (.*)$", (ROOT / "docs/index.md").read_text(), flags=re.MULTILINE)
    for title, section in zip(sections[1::2], sections[2::2], strict=True):
        links = (site_path(repository_path(link, "index.md")) for link in LINK.findall(section))
        pages = [link for link in dict.fromkeys(links) if link not in seen and link[-3:] == ".md"]
        seen.update(pages)
        navigation.append({title: pages})
    config.nav = navigation
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for path, page in ROOT_PAGES.items():
        pages[page] = (ROOT / path).read_text()
        files.append(File.generated(config, page, content=pages[page]))
    for page, text in pages.items():
        for link in LINK.findall(prose(text)):
            path = repository_path(link, page)
            name = site_path(path)
            if files.get_file_from_path(name) is None and (ROOT / path).is_file():
                files.append(
                    File.generated(
                        config,
                        name,
                        abs_src_path=str(ROOT / path),
                        inclusion=InclusionLevel.NOT_IN_NAV,
                    )
                )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    if here.startswith("files/"):
        return markdown
    folder = posixpath.dirname(here)

    def on_site(match: re.Match[str]) -> str:
        return posixpath.relpath(site_path(repository_path(match[1], here)), folder or ".")

    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(on_site, part) for part in parts)
