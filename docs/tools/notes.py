"""Prints the section of a version from docs/release-notes.md, after checking that all name it.

python docs/tools/notes.py 0.2.0
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return {title: body.strip() for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def faults(version: str, root: Path = ROOT) -> list[str]:
    """Why the tree is not that of a version, one sentence each."""
    sentences = []
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if project != version:
        sentences.append(f"pyproject.toml has version {project}, expected {version}")
    if f'\n__version__ = "{version}"\n' not in (root / "atomc/__init__.py").read_text():
        sentences.append(f"atomc.__version__ is not {version}")
    titles = sections((root / "CHANGELOG.md").read_text())
    if not any(title.startswith(f"[{version}] - ") for title in titles):
        sentences.append(f"CHANGELOG.md has no section [{version}] with its date")
    if version not in sections((root / "docs/release-notes.md").read_text()):
        sentences.append(f"docs/release-notes.md has no section {version}")
    return sentences


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    (version,) = arguments
    if sentences := faults(version):
        print("\n".join(sentences), file=sys.stderr)
        return 1
    print(sections((ROOT / "docs/release-notes.md").read_text())[version])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
