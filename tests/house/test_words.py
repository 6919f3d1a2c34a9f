"""What may not stand in any file, and whether the README's tree is the house as it is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from tests.house import source

# Written so that they do not match themselves.
FORBIDDEN = {
    "a directory of somebody's machine": r"(?<![\w./~$}-])/(?:root|work|(?:home|Users)/[\w.-]+)/",
    "a temporary directory": r"(?<![\w./~$}-])/(?:tmp|var/tmp)/",
    "an address of a package index": r"--(?:extra-)?index-url|--find[-]links|https?://\S+/simple\b",
}
FIRST_CELL_ONLY = re.compile(r" {2,}|\t")
TREE_LINES = "│├└─"
PATH_LIKE = re.compile(r"[\w.-]+/|[\w.-]+\.(?:toml|md|yaml|py)|Makefile|LICENSE|\.\w+/\w+|\.\w+")


def test_no_file_names_a_machine() -> None:
    found = []
    for path in source.repository_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for what, pattern in FORBIDDEN.items():
            if match := re.search(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(source.ROOT)}:{line} names {what}: {match[0]}")
    assert not found, "\n".join(found)


def test_the_readme_tree_names_only_what_exists() -> None:
    paths = list(_tree_of_readme())
    assert paths
    missing = [path for path in paths if not (source.ROOT / path).exists()]
    assert not missing, f"README.md names what does not exist: {missing}"


def test_the_readme_tree_names_all_of_the_package() -> None:
    named = {path.rstrip("/") for path in _tree_of_readme()}
    entries = {f"jaxpp/{entry.name}" for entry in os.scandir(source.ROOT / "jaxpp") if entry.name != "__pycache__"}
    assert not entries - named, f"missing in README.md's tree: {sorted(entries - named)}"


def test_models_is_a_relative_link() -> None:
    assert os.readlink(source.ROOT / "jaxpp" / "models") == os.path.join("..", "models")


def _tree_of_readme() -> Iterator[str]:
    """Yield the paths of the fenced block of README.md that holds the line `jaxpp/`.

    A line is `name  words`: names first, two spaces or more before the words; several names stand
    one space apart (`adapt/ compress/  words`), at the top also further apart. Deeper lines belong
    to the nearest line above that is indented less; `link -> target` counts as `link`.
    """
    text = (source.ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    block = next((b for b in blocks if re.search(r"^jaxpp/(\s|$)", b, flags=re.MULTILINE)), None)
    assert block, "README.md holds no fenced tree with a line that starts with jaxpp/"
    parents: list[tuple[int, str]] = []
    for line in block.splitlines():
        plain = line.translate(dict.fromkeys(map(ord, TREE_LINES), " "))
        if not plain.strip():
            continue
        indent = len(plain) - len(plain.lstrip())
        parents = [(depth, path) for depth, path in parents if depth < indent]
        above = parents[-1][1] if parents else ""
        names = _names(plain.strip(), at_top=not indent)
        yield from (above + name for name in names)
        if names[-1].endswith("/"):
            parents.append((indent, above + names[-1]))


def _names(line: str, at_top: bool) -> list[str]:
    cells = FIRST_CELL_ONLY.split(line)
    names = cells[0].partition(" -> ")[0].split(" ")
    for cell in cells[1:] if at_top else []:
        if not all(PATH_LIKE.fullmatch(word) for word in cell.split()):
            break
        names += cell.split()
    return names
