"""Sources: what is read, in which order, under which names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxpp.data import SOURCES, CorpusConfig, Document, read_documents


def read(source: Path | str, **settings: object) -> list[Document]:
    return list(read_documents(CorpusConfig(str(source), **settings)))


def refused(source: Path | str, **settings: object) -> str:
    with pytest.raises(ValueError) as error:
        read(source, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_file_directory_and_glob_agree_on_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".hidden").write_text("no")
    expected = [Document(name, name) for name in ("a.txt", "b.txt", "sub/c.txt")]
    assert read(tmp_path) == expected
    assert read(tmp_path / "**" / "*.txt") == expected
    assert read(tmp_path / "a.txt") == expected[:1]


def test_bytes_survive_reading(tmp_path: Path) -> None:
    text = "one\r\ntwo\rthree \u00e9\U0001f642\ufeff\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == [Document("a.txt", text)]


def test_jsonl_is_a_document_a_line(tmp_path: Path) -> None:
    lines = [json.dumps({"body": text}) for text in ("one", "two\n", "", "zw\u00f6lf")]
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines[0] + "\n\n" + "\n".join(lines[1:]), "utf-8")
    documents = read(tmp_path / "a.jsonl", text_field="body")
    names = ["a.jsonl:1", "a.jsonl:3", "a.jsonl:5"]
    texts = ["one", "two\n", "zw\u00f6lf"]
    assert documents == list(map(Document, names, texts))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "is not JSON"),
        (b"[1]", "is a JSON list; an object is needed"),
        (b'{"txt": "a"}', "no field 'text'; its fields are 'txt'"),
        (b'{"text": 3}', "field 'text' is int"),
        (b'{"text": "\xff"}', "is not UTF-8 text: byte 0xff at offset 10"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    found = refused(path)
    assert found.startswith(f"{path}:2 ") and message in found


def test_missing_corpus_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.txt")
    assert "does not exist" in refused(tmp_path / "*.md")
    assert "stdlib, pydoc" in refused("stdlub")


def test_corpus_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    assert "holds no text" in refused(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text(" \n")
    assert "holds no text" in refused(tmp_path)
    (tmp_path / "c.txt").write_text("text")
    assert [document.name for document in read(tmp_path)] == ["c.txt"]


def test_undecodable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    message = refused(tmp_path)
    assert str(tmp_path / "a.txt") in message and "byte 0xff at offset 2" in message


def test_pydoc_has_topics() -> None:
    documents = read("pydoc")
    assert "lambda" in {document.name for document in documents}
    assert documents == sorted(documents)


def test_stdlib_has_modules_and_no_tests() -> None:
    documents = list(read_documents(CorpusConfig("stdlib"), max_documents=40))
    names = [document.name for document in documents]
    assert len(names) == 40 and "argparse.py" in names and names == list(dict.fromkeys(names))
    every = {name.split("/")[0] for name in names}
    assert not every & {"test", "site-packages"}


def test_every_built_in_source_streams_documents() -> None:
    for name in SOURCES:
        first = next(read_documents(CorpusConfig(name)))
        assert first.name and first.text
