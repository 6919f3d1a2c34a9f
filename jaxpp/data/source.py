"""Where documents come from: built-in corpora, text files and JSONL.

A document is the unit of everything that follows: no token attends across two documents, and
the held-out split takes whole documents. Documents are streamed, never held all together.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from jaxpp.data.config import CorpusConfig

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    """Hold one text and the name that decides its side of the held-out split."""

    name: str  # stable across machines: a path below the corpus, or file:line
    text: str  # never empty


def read_documents(corpus: CorpusConfig, max_documents: int | None = None) -> Iterator[Document]:
    """Stream the documents of a corpus in a fixed order, without the blank ones.

    Args:
        corpus: what to read.
        max_documents: stop after so many; None reads all.

    Raises:
        ValueError: the corpus is missing, undecodable, malformed, or has no text at all.
    """
    reader = SOURCES.get(corpus.source, file_documents)
    documents = (document for document in reader(corpus) if document.text.strip())
    found = False
    for document in islice(documents, max_documents):
        found = True
        yield document
    if not found:
        raise ValueError(f"corpus {corpus.source!r} holds no text: every document in it is empty")


def stdlib_documents(corpus: CorpusConfig) -> Iterator[Document]:
    """Stream the .py files of Python's own standard library, without its tests (12 MB)."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root, skipped=_NOT_LIBRARY) if path.suffix == ".py"]
    if not paths:
        raise ValueError(f"corpus {corpus.source!r} needs the standard library as .py files, but {root} has none")
    return (Document(path.relative_to(root).as_posix(), _read_text(path)) for path in paths)


def pydoc_documents(corpus: CorpusConfig) -> Iterator[Document]:
    """Stream the help topics of Python's own `pydoc` (0.7 MB)."""
    del corpus
    from pydoc_data.topics import topics

    return (Document(name, topics[name]) for name in sorted(topics))


def file_documents(corpus: CorpusConfig) -> Iterator[Document]:
    """Stream a file, a directory or a glob: a text file is one document, so is a JSONL line.

    Names are paths below the directory or below the fixed part of the glob, so that two
    sources which overlap put a shared file on the same side of the held-out split.
    """
    root, paths = _find(os.path.expanduser(corpus.source))
    if not paths:
        raise ValueError(
            f"corpus {corpus.source!r} does not exist: no file, directory or glob match; "
            f"built-in corpora are {', '.join(SOURCES)}"
        )
    for path in paths:
        name = path.relative_to(root).as_posix()
        if path.suffix == ".jsonl":
            yield from _jsonl_documents(path, name, corpus.text_field)
        else:
            yield Document(name, _read_text(path))


SOURCES: dict[str, Callable[[CorpusConfig], Iterator[Document]]] = {
    "stdlib": stdlib_documents,
    "pydoc": pydoc_documents,
}
"""Built-in corpora by name; any other source is a path (`./stdlib` for a file of that name)."""


def _find(pattern: str) -> tuple[Path, list[Path]]:
    """Return the root that names are relative to, and the files in a fixed order."""
    path = Path(pattern)
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        return path, list(_walk(path, skipped=set()))
    parts = path.parts
    fixed = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
    return Path(*parts[:fixed]), [match for match in matches if match.is_file()]


def _walk(root: Path, skipped: set[str]) -> Iterator[Path]:
    """Yield the visible files below a directory, sorted at each level."""
    for directory, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        yield from (Path(directory, name) for name in sorted(files) if not name.startswith("."))


def _read_text(path: Path) -> str:
    # Decoded from bytes: text mode would turn \r\n into \n and lose bytes of the corpus.
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {_bad_byte(error)}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} at offset {error.start}; convert or remove it"


def _jsonl_documents(path: Path, name: str, text_field: str) -> Iterator[Document]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    text = _jsonl_text(line, f"{path}:{number}", text_field)
                    yield Document(f"{name}:{number}", text)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _jsonl_text(line: bytes, where: str, text_field: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {_bad_byte(error)}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a JSON {type(record).__name__}; an object is needed")
    if text_field not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"{where} has no field {text_field!r}; its fields are {keys}")
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(f"{where} field {text_field!r} is {type(text).__name__}; text is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half a surrogate pair at character {error.start}") from error
    return text
