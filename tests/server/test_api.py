"""Bodies of the API in, chunks out: without a server."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxpp.data import Tokenizer
from jaxpp.serve.request import Delta, Sampling, Token
from jaxpp.server.answer import Writer, collect
from jaxpp.server.api import CHAT, HARMLESS, REFUSED, SAMPLED, Offer, Order, read_order
from jaxpp.server.fields import ApiError, read_json
from jaxpp.server.spelling import Spelling
from tests.server.fake_engine import byte_tokenizer

OFFER = Offer("tiny", byte_tokenizer(), vocab_size=257, max_context=100, max_choices=8)
HELLO = [{"role": "user", "content": "hello"}]


def completion(**body: Any) -> Order:
    return read_order(False, {"prompt": "hello", **body}, OFFER)


def chat(**body: Any) -> Order:
    return read_order(True, {"messages": HELLO, **body}, OFFER)


def text(order: Order) -> str:
    return OFFER.tokenizer.decode(order.prompts[0]) if OFFER.tokenizer else ""


def refused(chat: bool, **body: Any) -> ApiError:
    needed = {"messages": HELLO} if chat else {"prompt": "hello"}
    with pytest.raises(ApiError) as caught:
        read_order(chat, {**needed, **body}, OFFER)
    return caught.value


def test_every_field_of_sampling_can_be_set() -> None:
    body = {
        "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"65": -5}, "seed": 3, "stop": "x",
        "stop_token_ids": [10], "min_tokens": 2, "ignore_eos": True, "logprobs": 4,
    }  # fmt: skip
    assert set(body) == set(SAMPLED)
    assert completion(**body).samplings == (
        Sampling(
            max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
            repetition_penalty=1.1, logit_bias={65: -5}, seed=3, stop=("x",), stop_ids=(10,), min_tokens=2,
            ignore_ends=True, logprobs=4,
        ),
    )  # fmt: skip


def test_null_is_the_default() -> None:
    nothing = {name: None for name in (*SAMPLED, "n", "stream", "stream_options", "echo", "best_of", *HARMLESS)}
    assert completion(**nothing) == completion()
    assert chat(**{name: None for name in (*CHAT, *HARMLESS, *REFUSED) if name != "messages"}) == chat()


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [(104, 105)]),
        (["hi", "a"], [(104, 105), (97,)]),
        ([104, 105], [(104, 105)]),
        ([[104], [105, 97]], [(104,), (105, 97)]),
    ],
)
def test_a_prompt_is_text_texts_ids_or_lists_of_ids(prompt: Any, ids: list[tuple[int, ...]]) -> None:
    assert list(completion(prompt=prompt).prompts) == ids


def test_without_a_tokenizer_ids_are_taken_and_text_is_not() -> None:
    offer = Offer("tiny", None, 257, 100, 8)
    assert read_order(False, {"prompt": [1, 2]}, offer).prompts == ((1, 2),)
    for body, param in (({"prompt": "a"}, "prompt"), ({"prompt": [1], "stop": "a"}, "stop")):
        with pytest.raises(ApiError, match="no tokenizer") as caught:
            read_order(False, body, offer)
        assert caught.value.body()["error"]["param"] == param


def test_echo_keeps_the_text_of_each_prompt() -> None:
    assert completion(prompt=["a", "b"], echo=True).echo == ("a", "b")
    assert completion(prompt=[104, 105], echo=True).echo == ("hi",)


def test_messages_go_through_the_template() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    assert text(chat(messages=messages)) == "<system>be kind\n<user>one\ntwo\n<assistant>"


def test_a_message_that_was_answered_can_be_sent_back() -> None:
    answered = {"role": "assistant", "content": "hi", "refusal": None, "audio": None, "function_call": None,
                "annotations": None, "tool_calls": None}  # fmt: skip
    assert "<assistant>hi\n" in text(chat(messages=[*HELLO, answered, *HELLO]))


def test_the_template_gets_tools_calls_as_objects_and_variables() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    said = text(chat(messages=messages, tools=tools, chat_template_kwargs={"mood": "!"}))
    assert said.startswith('[[{"type": "function"') and '<assistant>{"a": 1}\n' in said and said.endswith("!")
    assert text(chat(tools=tools, tool_choice="none")) == text(chat())


def test_tools_that_the_template_would_not_see_are_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ApiError, match="does not know them"):
        read_order(True, {"messages": HELLO, "tools": [{}]}, Offer("tiny", tokenizer, 257, 100, 8))


def test_a_completion_is_sixteen_tokens_and_a_chat_fills_the_context() -> None:
    assert completion().samplings[0].max_tokens == 16
    assert completion(prompt="x" * 90).samplings[0].max_tokens == 10
    order = chat()
    assert order.samplings[0].max_tokens == 100 - len(order.prompts[0])
    assert chat(max_completion_tokens=5, max_tokens=7).samplings[0].max_tokens == 5


def test_prompt_and_answer_together_fill_the_context_and_no_more() -> None:
    assert completion(prompt="x" * 90, max_tokens=10).samplings[0].max_tokens == 10
    for body in ({"prompt": "x" * 90, "max_tokens": 11}, {"prompt": "x" * 100}, {"prompt": "x" * 500}):
        error = refused(False, **body).body()["error"]
        assert error["code"] == "context_length_exceeded" and "the most is 100" in error["message"]
    assert refused(True, messages=[{"role": "user", "content": "x" * 100}]).body()["error"]["param"] == "messages"


def test_answers_to_one_prompt_draw_from_seeds_in_a_row() -> None:
    assert [one.seed for one in completion(n=3, seed=5).samplings] == [5, 6, 7]
    assert [one.seed for one in completion(n=2).samplings] == [None, None]
    assert completion(seed=-1).samplings[0].seed == 2**31 - 1
    assert completion(seed=2**63 - 1, n=2).samplings[1].seed == 0


def test_more_kept_tokens_than_there_are_keep_all() -> None:
    assert completion(top_k=10**15).samplings[0].top_k == 257


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", "temperature is a text; a number is needed"),
        ({"temperature": True}, "temperature", "a boolean"),
        ({"temperature": -1}, "temperature", "0 to 100"),
        ({"temperature": 10**400}, "temperature", "too large"),
        ({"top_p": 1.5}, "top_p", "0 to 1"),
        ({"top_k": -2}, "top_k", "-1 or more"),
        ({"top_k": 1.5}, "top_k", "a number; an integer is needed"),
        ({"presence_penalty": -2.5}, "presence_penalty", "-2 to 2"),
        ({"frequency_penalty": 3}, "frequency_penalty", "-2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "more than 0"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"max_tokens": "5"}, "max_tokens", "a text"),
        ({"min_tokens": 30, "max_tokens": 20}, "min_tokens", "more than max_tokens 20"),
        ({"seed": 2**63}, "seed", "64 bits"),
        ({"n": 0}, "n", "1 to 8"),
        ({"n": 9}, "n", "1 to 8"),
        ({"n": 3, "prompt": ["a", "b", "c"]}, "n", "1 to 2 answers of each of 3 prompts"),
        ({"prompt": ["a"] * 9}, "prompt", "8 or fewer"),
        ({"best_of": 2}, "best_of", "best_of 2 with n 1"),
        ({"stop": ["x"] * 1000}, "stop", "1000 texts; 16 or fewer"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["x", 3]}, "stop[1]", "an integer; a text is needed"),
        ({"stop": "x" * 1001}, "stop", "1,001 characters"),
        ({"stop_token_ids": [257]}, "stop_token_ids", "0 to 256"),
        ({"stop_token_ids": [1] * 1000}, "stop_token_ids", "1000 ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias", '"x"'),
        ({"logit_bias": {"257": 1}}, "logit_bias", "0 to 256"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": [1]}, "logit_bias", "a list; an object"),
        ({"stream": 1}, "stream", "an integer; a boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"include": 1}}, "stream_options", "include_usage"),
        ({"model": 5}, "model", "an integer"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_on_both_routes(body: dict[str, Any], param: str, words: str) -> None:
    for chat in (False, True):
        if chat and ("prompt" in body or "best_of" in body):
            continue
        error = refused(chat, **body)
        assert (error.status, error.body()["error"]["param"]) == (400, param)
        assert words in error.message


@pytest.mark.parametrize(
    ("chat", "body", "param"),
    [
        (False, {"prompt": None}, "prompt"),
        (False, {"prompt": ""}, "prompt"),
        (False, {"prompt": []}, "prompt"),
        (False, {"prompt": ["a", 1]}, "prompt[1]"),
        (False, {"prompt": [1, "a"]}, "prompt[1]"),
        (False, {"prompt": [[1], "a"]}, "prompt[1]"),
        (False, {"prompt": [257]}, "prompt"),
        (False, {"prompt": [-1]}, "prompt"),
        (False, {"prompt": {"a": 1}}, "prompt"),
        (False, {"logprobs": True}, "logprobs"),
        (False, {"logprobs": 21}, "logprobs"),
        (False, {"echo": True, "logprobs": 1}, "echo"),
        (True, {"logprobs": 1}, "logprobs"),
        (True, {"top_logprobs": 2}, "top_logprobs"),
        (True, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (True, {"messages": None}, "messages"),
        (True, {"messages": []}, "messages"),
        (True, {"messages": "hello"}, "messages"),
        (True, {"messages": ["hello"]}, "messages[0]"),
        (True, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (True, {"messages": [{"role": "usr", "content": "a"}]}, "messages[0].role"),
        (True, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (True, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (True, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (True, {"messages": [{"role": "user", "content": "a", "rolle": 1}]}, "messages[0]"),
        (True, {"chat_template_kwargs": {"eos_token": ""}}, "chat_template_kwargs"),
        (True, {"tools": {}}, "tools"),
    ],
)  # fmt: skip
def test_a_wrong_prompt_is_named(chat: bool, body: dict[str, Any], param: str) -> None:
    error = refused(chat, **body)
    assert (error.status, error.body()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("chat", "body"),
    [
        (True, {"response_format": {"type": "json_object"}}),
        (True, {"tools": [{}], "tool_choice": "required"}),
        (True, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (True, {"functions": [{}]}),
        (True, {"audio": {"voice": "x"}}),
        (True, {"modalities": ["text", "audio"]}),
        (True, {"reasoning_effort": "high"}),
        (True, {"parallel_tool_calls": False}),
        (False, {"suffix": "end"}),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused(chat: bool, body: dict[str, Any]) -> None:
    error = refused(chat, **body).body()["error"]
    assert error["param"] == list(body)[-1] and error["code"] == "unsupported_parameter"


def test_what_changes_nothing_is_accepted() -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    assert chat(**harmless, response_format={"type": "text"}, modalities=["text"]) == chat()
    assert completion(**harmless, suffix="", best_of=1) == completion()


def test_an_unknown_field_is_told_the_nearest_name() -> None:
    error = refused(False, temprature=1)
    assert 'did you mean "temperature"?' in error.message
    assert error.body()["error"]["code"] == "unknown_parameter"


def test_an_unknown_model_is_not_found() -> None:
    error = refused(True, model="tinny")
    assert (error.status, error.body()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff{}", "byte 0xff at 0"),
        (b"[1]", "a list; an object is needed"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a":' * 100_000, "nested"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        read_json(raw)
    assert caught.value.status == 400


EMOJI = [Token(byte, -0.1, ((byte, -0.1), (97, -2.0))) for byte in "🙂".encode()]


def written(order: Order, *deltas: tuple[int, Delta]) -> list[dict[str, Any]]:
    writer = Writer(order, "tiny", "fp_1", Spelling(OFFER.tokenizer))
    chunks = [chunk for index, delta in deltas for chunk in writer.write(index, delta)]
    return [*chunks, writer.usage(cached_tokens=2)]


def test_half_a_character_has_bytes_and_no_text() -> None:
    deltas = [(0, Delta("", (token,))) for token in EMOJI[:3]] + [(0, Delta("🙂", (EMOJI[3],), "stop"))]
    body = collect(written(chat(logprobs=True, top_logprobs=2), *deltas))
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "🙂"
    assert [entry["token"] for entry in content] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]
    assert [other["token"] for other in content[0]["top_logprobs"]] == ["bytes:\\xf0", "a"]
    assert body["choices"][0]["message"]["content"] == "🙂"


def test_logprobs_of_a_completion_tell_where_each_token_begins() -> None:
    tokens = [Token(120, -1.0), *EMOJI, Token(121, -float("inf"))]
    deltas = [(0, Delta("x", tuple(tokens[:1]))), (0, Delta("🙂y", tuple(tokens[1:]), "length"))]
    logprobs = collect(written(completion(logprobs=1), *deltas))["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert logprobs["tokens"][0] == "x" and logprobs["top_logprobs"][0] == {"x": -1.0}
    assert logprobs["token_logprobs"][-1] == -9999.0  # JSON has no infinity


def test_a_prompt_counts_once_however_many_answers_it_gets() -> None:
    deltas = [(i, Delta("ab", (Token(97), Token(98)), "stop")) for i in (1, 0)]
    body = collect(written(completion(n=2), *deltas))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


def test_a_delta_that_says_nothing_writes_nothing() -> None:
    assert len(written(completion(), (0, Delta("", (Token(240),))))) == 1
    assert len(written(completion(logprobs=0), (0, Delta("", (Token(240),))))) == 2


def test_special_tokens_are_spelled_as_the_vocabulary_does() -> None:
    spelling = Spelling(OFFER.tokenizer)
    assert (spelling.text(256), spelling.bytes(256)) == ("<|endoftext|>", b"<|endoftext|>")
    assert (spelling.text(32), spelling.text(9999)) == (" ", "")


def test_words_keep_the_space_before_them_and_bytes_their_value() -> None:
    backend = Backend(models.BPE({"</s>": 0, "▁a": 1, "<0xF0>": 2, "b": 3}, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    spelling = Spelling(Tokenizer(backend))
    assert [spelling.bytes(i) for i in range(4)] == [b"</s>", b" a", b"\xf0", b"b"]
