"""Tokenizers of published checkpoints: every file that says something is heard, and the texts alone suffice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, processors

from jaxpp.data import Tokenizer, published, vocabulary

END, BEGIN, TURN, USER = 256, 257, 258, 259


def tokenizer_json(begins: bool = False) -> str:
    backend = vocabulary.parse(Tokenizer.bytes().to_json())
    backend.add_special_tokens(["<s>", AddedToken("<turn>", rstrip=True, special=True)])
    backend.add_tokens(["<tool>"])
    if begins:
        begin = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", BEGIN)])
        backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return backend.to_str()


def directory(path: Path, **files: Any) -> Path:
    """Write files; two underscores in a name stand for its dot."""
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return path


def read(path: Path, **files: Any) -> Tokenizer:
    tokenizer = published.read_tokenizer(directory(path, **files))
    assert tokenizer is not None
    return tokenizer


def test_tokens_may_be_strings_or_carry_flags(tmp_path: Path) -> None:
    config = {"eos_token": "<turn>", "bos_token": {"content": "<s>", "lstrip": False}, "chat_template": "T"}
    tokenizer = read(tmp_path, tokenizer__json=tokenizer_json(), tokenizer_config__json=config)
    assert (tokenizer.end_of_text, tokenizer.begin_of_text, tokenizer.add_bos) == (TURN, BEGIN, False)
    assert tokenizer.chat_template == "T" and tokenizer.encode("a", begin=True).tolist() == [97]
    flagged = {"eos_token": {"content": "<turn>"}, "bos_token": "<s>"}
    mapped = read(tmp_path / "map", tokenizer__json=tokenizer_json(), special_tokens_map__json=flagged)
    assert (mapped.end_of_text, mapped.begin_of_text) == (TURN, BEGIN)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [END, TURN]}, {"eos_token_id": 5}, {END, TURN}),
        ({"eos_token_id": END}, {}, {END, TURN}),
        ({}, {"eos_token_id": [END]}, {END, TURN}),
        ({}, {}, {TURN}),
    ],
)
def test_all_ends_are_known(generation: dict, config: dict, ends: set[int], tmp_path: Path) -> None:
    files = dict(generation_config__json=generation, config__json=config, tokenizer__json=tokenizer_json())
    tokenizer = read(tmp_path, tokenizer_config__json={"eos_token": "<turn>"}, **files)
    assert tokenizer.end_of_text == TURN and tokenizer.ends == ends
    bare = read(tmp_path / "bare", **files)
    assert bare.end_of_text in bare.ends and (not generation or bare.ends == ends - {TURN} | bare.ends & {TURN})


@pytest.mark.parametrize(
    ("begins", "config", "ids"),
    [
        (False, {}, [97]),
        (True, {}, [BEGIN, 97]),
        (True, {"bos_token": "<s>", "add_bos_token": False}, [97]),
        (False, {"bos_token": "<s>", "add_bos_token": True}, [BEGIN, 97]),
        (False, {"bos_token": "<s>"}, [97]),
        (True, {"bos_token": "<s>"}, [BEGIN, 97]),
    ],
)
def test_begin_of_text(begins: bool, config: dict, ids: list[int], tmp_path: Path) -> None:
    tokenizer = read(tmp_path, tokenizer__json=tokenizer_json(begins), tokenizer_config__json=config)
    assert tokenizer.encode("a", begin=True).tolist() == ids and tokenizer.encode("a").tolist() == [97]


def test_templates_in_all_places(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    files = dict(tokenizer__json=tokenizer_json(), tokenizer_config__json={"chat_template": named})
    assert read(tmp_path, **files).chat_template == "B"
    assert read(tmp_path, **files, chat_template__jinja="C\n").chat_template == "C\n"
    assert read(tmp_path / "none", tokenizer__json=tokenizer_json()).chat_template is None


def test_the_texts_alone_give_the_same_tokenizer(tmp_path: Path) -> None:
    files: dict[str, Any] = dict(tokenizer__json=tokenizer_json(True), chat_template__jinja="{{ bos_token }}x")
    files |= dict(tokenizer_config__json={"eos_token": "<turn>"}, generation_config__json={"eos_token_id": [END]})
    tokenizer = read(tmp_path, **files, config__json={"eos_token_id": 3}, README__md="no")
    texts = published.texts(tmp_path)
    names = {"tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json"}
    assert texts == {name: (tmp_path / name).read_text() for name in names}
    same(tokenizer, published.tokenizer_of(texts))
    same(tokenizer, published.tokenizer_of(published.texts_of(tokenizer)))


def same(one: Tokenizer, other: Tokenizer | None) -> None:
    assert other is not None and one.fingerprint == other.fingerprint and one.to_json() == other.to_json()
    assert (one.end_of_text, one.ends, one.chat_template) == (other.end_of_text, other.ends, other.chat_template)
    assert (one.begin_of_text, one.add_bos) == (other.begin_of_text, other.add_bos)


def test_special_tokens_are_kept(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, tokenizer__json=tokenizer_json(), tokenizer_config__json={"eos_token": "<turn>"})
    for one in (tokenizer, Tokenizer.from_json(tokenizer.to_json())):
        text = "<s>a<turn>\nb<tool>"
        assert one.encode(text, special=True).tolist() == [BEGIN, 97, TURN, 98, USER]  # its rstrip takes the newline
        assert one.encode(text).tolist() == [*text.removesuffix("<tool>").encode(), USER]
        assert one.encode(text, special=True).tolist() == [BEGIN, 97, TURN, 98, USER]
        assert one.decode(one.encode(text, special=True)) == "ab<tool>"


def gpt2(path: Path, **more: Any) -> Path:
    tokens = [token for token, _ in sorted(json.loads(Tokenizer.bytes().to_json())["model"]["vocab"].items())]
    ids = {token: index for index, token in enumerate([*tokens, "ab", "12", "<|endoftext|>"])}
    return directory(path, vocab__json=ids, merges__txt="#version: 0.2\na b\n1 2\n", **more)


def test_vocabulary_and_merges(tmp_path: Path) -> None:
    tokenizer = published.read_tokenizer(gpt2(tmp_path, added_tokens__json={"<tool>": 259, "<pad>": 260}))
    assert tokenizer is not None and tokenizer.end_of_text == 258 and tokenizer.vocab_size == 261
    text = "ab 12 n\u00e4 \u6771\r\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and ids[0] == 256 and 259 in tokenizer.encode("a<tool>")
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.encode("12").tolist() == [257]
    decoder = {"259": {"content": "<end>", "special": True}}
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<end>", "added_tokens_decoder": decoder}
    qwen = published.read_tokenizer(gpt2(tmp_path / "q", tokenizer_config__json=config))
    assert qwen is not None and qwen.end_of_text == 259
    assert len(qwen.encode("12")) == 2 and qwen.decode(qwen.encode("e\u0301")) == "\u00e9"


def test_no_tokenizer_is_no_error(tmp_path: Path) -> None:
    assert published.read_tokenizer(directory(tmp_path, config__json={})) is None
    assert published.texts(tmp_path) == {} and published.tokenizer_of({}) is None


WRONG: dict[str, Callable[[Path], Any]] = {
    "tokenizer.model, which we do not read, and no tokenizer.json; save it once": (
        lambda path: (directory(path) / "tokenizer.model").write_bytes(b"\x0a")
    ),
    "this is not a tokenizer.json": lambda path: directory(path, tokenizer__json="{}"),
    "tokenizer_config.json is no JSON:": (
        lambda path: directory(path, tokenizer__json=tokenizer_json(), tokenizer_config__json="{")
    ),
    "generation_config.json is no JSON object": (
        lambda path: directory(path, tokenizer__json=tokenizer_json(), generation_config__json="[]")
    ),
    "eos_token '<x>' is not in the vocabulary": (
        lambda path: directory(path, tokenizer__json=tokenizer_json(), tokenizer_config__json={"eos_token": "<x>"})
    ),
    "no token 7000; its ids end at 259": (
        lambda path: directory(path, tokenizer__json=tokenizer_json(), generation_config__json={"eos_token_id": 7000})
    ),
    "'abc' is no pair of tokens": lambda path: gpt2(path).joinpath("merges.txt").write_text("abc\n"),
    "of a RobertaTokenizer are not read, those of GPT2Tokenizer": (
        lambda path: gpt2(path, tokenizer_config__json={"tokenizer_class": "RobertaTokenizer"})
    ),
    "added token '<x>' has id 700, but the vocabulary leaves it 259": (
        lambda path: gpt2(path, added_tokens__json={"<x>": 700})
    ),
    "cannot be read": lambda path: (directory(path) / "merges.txt").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_files_are_refused(message: str, tmp_path: Path) -> None:
    WRONG[message](tmp_path)
    with pytest.raises(ValueError) as error:
        published.read_tokenizer(tmp_path)
    assert message in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_ids_are_int32(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, tokenizer__json=tokenizer_json(True))
    assert tokenizer.encode("", begin=True).dtype == tokenizer.encode("<s>", special=True).dtype == np.int32


@pytest.mark.parametrize("pre", vocabulary.PRE_TOKENIZERS)
def test_every_way_to_cut_keeps_the_text(pre: str) -> None:
    ids = json.loads(Tokenizer.bytes().to_json())["model"]["vocab"]
    end = vocabulary.Added(256, "<|endoftext|>", special=True)
    tokenizer = Tokenizer(vocabulary.byte_level(ids, [], pre, [end]))
    for text in (
        "It's 12345 o'CLOCK,\r\n\n\t  na\u00efve (\u6771\u4eac)  $+<|>",
        " a  b ",
        "DON'T/\n\u0e01\u0e34 \u0661\u00bd",
    ):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded) == text and tokenizer.token_bytes[encoded].sum() == len(text.encode())


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", " O", "'", "CLOCK", "!", "\n\n ", " x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " O", "'", "CLOCK", "!", "\n\n ", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " O", "'CLOCK", "!\n\n", " ", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " O", "'CLOCK", "!\n\n", " ", " x"]),
        ("gpt-4o", ["It's", " ", "123", "45", " O", "'CLOCK", "!\n\n", " ", " x"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " O", "'CLOCK", "!\n\n", " ", " x"]),
    ],
)
def test_where_a_text_is_cut(pre: str, pieces: list[str]) -> None:
    from tokenizers import pre_tokenizers

    backend = vocabulary.byte_level({"a": 0}, [], pre)
    assert isinstance(backend.pre_tokenizer, pre_tokenizers.PreTokenizer)
    cut = backend.pre_tokenizer.pre_tokenize_str("It's 12345 O'CLOCK!\n\n  x")
    assert [piece.replace("\u0120", " ").replace("\u010a", "\n") for piece, _ in cut] == pieces
