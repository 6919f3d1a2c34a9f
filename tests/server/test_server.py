"""The server, over real connections: OpenAI's own client, and bare HTTP for what it cannot be made to do."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import logging
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from jaxpp import serve_commands
from jaxpp.serve.request import Sampling
from jaxpp.server import listen
from jaxpp.server.app import ServerSettings, make_app
from tests.server.fake_engine import END, FakeEngine, endless

HELLO: Any = [{"role": "user", "content": "hello"}]
ANSWER = "<USER>HELLO\n<ASSISTANT>"  # the fake engine says its prompt in capitals


class Running:
    """A server on a free port, in a thread."""

    def __init__(self, engine: FakeEngine, drain_s: float = 0.2, **settings: Any) -> None:
        self.engine = engine
        self.port = listen.bind("127.0.0.1", 0)
        ready = threading.Event()
        app = make_app(engine, ServerSettings(**settings), "org/tiny")
        self.server: Any = listen.server(app, engine, drain_s=drain_s, ready=ready.set)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.port]}, daemon=True)
        self.url = f"http://127.0.0.1:{self.port.getsockname()[1]}"
        self.thread.start()
        assert ready.wait(10)
        self.http = httpx.Client(base_url=self.url, timeout=20, limits=httpx.Limits(max_connections=100))
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def post(self, path: str = "completions", **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json={"prompt": "hello", **body} if path == "completions" else body)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.server.stop(0.0)
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(engine: FakeEngine, **settings: Any) -> Iterator[Running]:
    running = Running(engine, **settings)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def tiny() -> Iterator[Running]:
    with serving(FakeEngine()) as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with serving(FakeEngine(endless, step_s=0.005, num_slots=2)) as running:
        yield running


def wait_for(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return error


def metrics(running: Running) -> dict[str, float]:
    lines = [line for line in running.http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


# What the OpenAI client sees


def test_a_chat_is_answered(tiny: Running) -> None:
    answer = tiny.openai.chat.completions.create(model="org/tiny", messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (ANSWER, "assistant", "stop")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint and answer.model == "org/tiny" and answer._request_id
    usage = answer.usage
    assert usage and usage.prompt_tokens_details
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (23, 23, 46)


def test_a_completion_is_continued(tiny: Running) -> None:
    answer = tiny.openai.completions.create(model="org/tiny", prompt=["one", "two"], max_tokens=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["oneON", "twoTW"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")


def test_a_stream_brings_the_same_in_pieces(tiny: Running) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        tiny.openai.chat.completions.create(model="org/tiny", messages=HELLO, stream=True, stream_options=options)
    )
    assert len(chunks) > 10 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.completion_tokens == 23
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_reused_prompt_is_counted_in_the_usage(tiny: Running) -> None:
    def cached() -> int | None:
        usage = tiny.openai.completions.create(model="org/tiny", prompt="never said before", n=2).usage
        assert usage and usage.prompt_tokens_details
        return usage.prompt_tokens_details.cached_tokens

    assert [cached(), cached()] == [0, 16]


@pytest.fixture(scope="module")
def saying_hello() -> Iterator[Running]:
    with serving(FakeEngine(lambda prompt, sampling: [*b"HELLO", END])) as running:
        yield running


@pytest.mark.parametrize("stop", ["LL", ["zz", "LO"], "HELLO", None])
@pytest.mark.parametrize("max_tokens", [3, 16])
def test_stops_cut_alike_on_both_routes_streamed_or_not(saying_hello: Running, stop: Any, max_tokens: int) -> None:
    whole = "HELLO"[:max_tokens]
    cut = min((whole.find(one) for one in ([stop] if isinstance(stop, str) else stop or []) if one in whole), default=9)
    expected = (whole[:cut], "stop" if cut < 9 or max_tokens > 5 else "length")
    settings: Any = {"model": "org/tiny", "max_tokens": max_tokens, "stop": stop, "logprobs": True}
    chat: Any = {**settings, "messages": HELLO}
    completion: Any = {**settings, "prompt": "hello", "logprobs": 0}
    client = saying_hello.openai
    answered = client.chat.completions.create(**chat).choices[0]
    continued = client.completions.create(**completion).choices[0]
    said, went, finish, finished = "", "", None, None
    for chunk in client.chat.completions.create(**chat, stream=True):
        said, finish = said + (chunk.choices[0].delta.content or ""), chunk.choices[0].finish_reason
    for piece in client.completions.create(**completion, stream=True):
        went, finished = went + piece.choices[0].text, piece.choices[0].finish_reason
    assert (answered.message.content, answered.finish_reason) == (said, finish) == expected
    assert (continued.text, continued.finish_reason) == (went, finished) == expected
    assert answered.logprobs and answered.logprobs.content and continued.logprobs
    assert [entry.token for entry in answered.logprobs.content] == continued.logprobs.tokens


def test_logprobs_come_in_the_format_of_each_route(tiny: Running) -> None:
    chat = tiny.openai.chat.completions.create(model="org/tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
    first = chat.choices[0].logprobs.content[0]
    assert (first.token, first.bytes, first.logprob) == ("<", [60], -0.5)
    assert [(other.token, other.logprob) for other in first.top_logprobs] == [("<", -0.5), ("=", -1.5)]
    logprobs = tiny.openai.completions.create(model="org/tiny", prompt="ab", logprobs=2).choices[0].logprobs
    assert logprobs and logprobs.tokens == ["A", "B"] and logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs == [{"A": -0.5, "B": -1.5}, {"B": -0.5, "C": -1.5}]
    plain = tiny.openai.chat.completions.create(model="org/tiny", messages=HELLO)
    assert plain.choices[0].logprobs is None


def test_streamed_logprobs_are_those_of_the_whole_answer(tiny: Running) -> None:
    settings: Any = {"model": "org/tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    whole = tiny.openai.chat.completions.create(**settings).choices[0].logprobs
    pieces = []
    for chunk in tiny.openai.chat.completions.create(**settings, stream=True):
        pieces += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert whole and pieces == whole.content


def test_answers_to_one_prompt_differ_and_a_seed_repeats_them(tiny: Running) -> None:
    def texts(seed: int, n: int) -> list[str]:
        answer = tiny.openai.completions.create(model="org/tiny", prompt="a", n=n, seed=seed, max_tokens=30)
        return [choice.text for choice in answer.choices]

    assert texts(1, 3) == texts(1, 3) and len(set(texts(1, 3))) == 3
    assert texts(1, 3)[1] == texts(2, 1)[0]


def test_streamed_answers_to_one_prompt_keep_their_index(tiny: Running) -> None:
    said = {0: "", 1: ""}
    for chunk in tiny.openai.completions.create(model="org/tiny", prompt=["one", "two"], stream=True):
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert said == {0: "ONE", 1: "TWO"}


def test_our_own_fields_pass_through_the_client(tiny: Running) -> None:
    own = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1, "ignore_eos": True,
           "stop_token_ids": [10]}  # fmt: skip
    tiny.openai.completions.create(model="org/tiny", prompt="pass through", max_tokens=5, extra_body=own)
    assert tiny.engine.submitted[-1].sampling == Sampling(
        max_tokens=5, top_k=3, min_p=0.1, repetition_penalty=1.2, min_tokens=1, ignore_ends=True, stop_ids=(10,)
    )


def test_characters_are_never_cut(tiny: Running) -> None:
    pieces = [
        chunk.choices[0].text for chunk in tiny.openai.completions.create(model="org/tiny", prompt="é🙂", stream=True)
    ]
    assert "".join(pieces) == "É🙂" and "🙂" in pieces


def test_the_model_is_listed(tiny: Running) -> None:
    assert [model.id for model in tiny.openai.models.list()] == ["org/tiny"]
    assert tiny.openai.models.retrieve("org/tiny").owned_by == "jaxpp"
    with pytest.raises(openai.NotFoundError):
        tiny.openai.models.retrieve("org/other")


def test_the_client_raises_what_its_users_catch(tiny: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="org/tiny"):
        tiny.openai.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        tiny.openai.chat.completions.create(model="org/tiny", messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.openai.completions.create(model="org/tiny", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"


# Leaving


def test_leaving_a_stream_frees_the_slot(slow: Running) -> None:
    stream = slow.openai.chat.completions.create(model="org/tiny", messages=HELLO, stream=True)
    next(iter(stream))
    assert slow.engine.num_open == 1
    stream.close()
    wait_for(lambda: slow.engine.num_open == 0, 1)


def test_leaving_without_a_stream_frees_the_slots(slow: Running) -> None:
    with pytest.raises(httpx.ReadTimeout):
        slow.http.post("/v1/completions", json={"prompt": "a", "n": 3, "max_tokens": 2000}, timeout=0.2)
    wait_for(lambda: slow.engine.num_open == 0, 1)
    assert slow.engine.statistics().finished["cancelled"] >= 3


def test_leaving_in_the_queue_is_leaving(slow: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(slow.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True,
                                                                                  "max_tokens": 2000}))  # fmt: skip
        with pytest.raises(httpx.ReadTimeout):
            slow.http.post("/v1/completions", json={"prompt": "b", "stream": True}, timeout=0.2)
        wait_for(lambda: slow.engine.statistics().num_waiting == 0, 1)
        assert slow.engine.statistics().num_running == 2
    wait_for(lambda: slow.engine.num_open == 0, 1)


@pytest.mark.timeout(60)
def test_fifty_clients_that_come_and_go_lose_nothing() -> None:
    def talk(number: int) -> bool:
        draw = random.Random(number)
        for _ in range(6):
            kept, leaves = draw.randint(1, 20), draw.random() < 0.4
            body = {"prompt": f"client {number}", "seed": number, "max_tokens": kept, "stream": draw.random() < 0.6}
            expected = bytes(engine_says(number)[:kept]).decode()
            said = _listen(running.http, body, leaves_after=draw.randint(1, 3) if leaves else None)
            if said is not None and said != expected:
                return False
        return True

    def engine_says(seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.choice(b"abcdefgh ") for _ in range(20)]

    engine = FakeEngine(num_slots=8, queue=1000, step_s=0.001)
    with serving(engine) as running, concurrent.futures.ThreadPoolExecutor(50) as clients:
        assert all(clients.map(talk, range(50)))
        wait_for(lambda: engine.num_open == 0)
        assert engine.most_running == 8
        finished = engine.statistics().finished
        assert sum(finished.values()) == len(engine.submitted) == 300
        assert finished["cancelled"] > 0 and not finished["error"] and not finished["timeout"]
        page = metrics(running)
        assert page["jaxpp_requests_running"] == page["jaxpp_requests_waiting"] == page["jaxpp_cache_pages_used"] == 0
        assert page['jaxpp_requests_finished_total{reason="cancelled"}'] == finished["cancelled"]


def _listen(http: httpx.Client, body: dict[str, Any], leaves_after: int | None) -> str | None:
    """Return what was said, or None where the client left before the end."""
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        if not body["stream"]:
            return None if leaves_after else json.loads(response.read())["choices"][0]["text"]
        said = ""
        for i, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
            if leaves_after and i >= leaves_after:
                return None
            said += json.loads(line[6:])["choices"][0]["text"]
    return said


# Mistakes


def test_bodies_that_are_no_json_are_refused(tiny: Running) -> None:
    for raw in (b"{", b"\xff\xfe", b"[]", b'{"prompt": "\\udfff"}', b'{"prompt":' * 50_000):
        response = tiny.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
        assert error_of(response, 400)["type"] == "invalid_request_error"


def test_bodies_that_a_web_page_could_send_anywhere_are_refused(tiny: Running) -> None:
    response = tiny.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    error_of(response, 415)
    preflight = tiny.http.options("/v1/completions", headers={"origin": "http://evil.test"})
    assert preflight.status_code == 405 and "access-control-allow-origin" not in preflight.headers


def test_mistakes_name_the_field(tiny: Running) -> None:
    assert error_of(tiny.post(stop=["x"] * 1000), 400)["param"] == "stop"
    assert error_of(tiny.post(presence_penalty=-9), 400)["param"] == "presence_penalty"
    assert error_of(tiny.post("chat/completions", messages=5), 400)["param"] == "messages"
    assert error_of(tiny.post(stream=True, n="3"), 400)["param"] == "n"


def test_what_the_engine_refuses_is_the_clients_mistake(tiny: Running) -> None:
    assert "9 pages" in error_of(tiny.post(prompt=[299]), 400)["message"]


def test_unknown_routes_and_wrong_methods_are_told_the_right_ones(tiny: Running) -> None:
    assert "/v1/chat/completions" in error_of(tiny.http.post("/v1/embeddings"), 404)["message"]
    error_of(tiny.http.get("/v1/models/"), 404)
    response = tiny.http.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_every_response_names_its_request(tiny: Running) -> None:
    assert tiny.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    named = {tiny.http.get(path).headers["x-request-id"] for path in ("/health", "/nowhere", "/v1/completions")}
    assert len(named) == 3
    assert tiny.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


def test_a_key_is_asked_for_everywhere_but_at_health() -> None:
    with serving(FakeEngine(), api_key="sésame") as running:
        assert running.http.get("/health").status_code == 200
        paths = ("/v1/models", "/v1/models/org/tiny", "/metrics")
        for wrong in (b"", b"Bearer wrong", "Basic sésame".encode()):
            headers = {b"authorization": wrong}
            for path in paths:
                response = running.http.get(path, headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key"
            error_of(running.http.post("/v1/completions", json={"prompt": "a"}, headers=headers), 401)
        assert response.headers["www-authenticate"] == "Bearer"
        right = {b"authorization": "Bearer sésame".encode()}
        assert all(running.http.get(path, headers=right).status_code == 200 for path in paths)
        assert not running.engine.submitted
        with pytest.raises(openai.AuthenticationError):
            running.openai.models.list()


def test_a_body_over_the_limit_is_refused_however_it_comes() -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(3000):
            yield b" " * 1024

    with serving(FakeEngine(), max_body_bytes=2048) as running:
        assert error_of(running.post(prompt="x" * 4096), 413)["code"] == "body_too_large"
        kind = {"content-type": "application/json"}
        error_of(running.http.post("/v1/completions", content=pieces(), headers=kind), 413)
        assert running.post(prompt="x").status_code == 200


def test_a_body_that_does_not_come_is_given_up() -> None:
    with serving(FakeEngine(), body_timeout_s=0.1) as running:
        host, port = running.port.getsockname()
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                               b"content-length: 100\r\n\r\n{")  # fmt: skip
            assert b" 408 " in connection.recv(1000)


def test_a_full_queue_says_when_to_come_again() -> None:
    engine = FakeEngine(endless, num_slots=1, queue=2, step_s=0.005)
    with serving(engine) as running:
        streams = [running.openai.completions.create(model="org/tiny", prompt="a", stream=True, max_tokens=2000)]
        next(iter(streams[0]))
        response = running.post(n=3)  # all or none
        assert error_of(response, 429)["code"] == "queue_full" and response.headers["retry-after"] == "1"
        wait_for(lambda: engine.num_open == 1)
        with pytest.raises(openai.RateLimitError):
            running.openai.completions.create(model="org/tiny", prompt="a", n=3)
        streams[0].close()
        wait_for(lambda: engine.num_open == 0)


def test_an_answer_that_takes_too_long_ends_with_504_or_an_event() -> None:
    engine = FakeEngine(endless, num_slots=2, step_s=0.005)
    with serving(engine, timeout_s=0.15) as running:
        response = running.post(max_tokens=2000)
        assert error_of(response, 504)["code"] == "timeout" and response.headers["x-should-retry"] == "false"
        stream = running.openai.completions.create(model="org/tiny", prompt="a", stream=True, max_tokens=2000)
        with pytest.raises(openai.APIError, match="longer than this server allows"):
            for _ in stream:
                pass
        text = running.post(stream=True, max_tokens=2000).text
        assert text.startswith("data: {") and '"code":"timeout"' in text.split("\n\n")[-2] and "[DONE]" not in text
        assert engine.num_open == 0


def test_a_failure_is_logged_under_the_request_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeEngine(lambda prompt, sampling: [])) as running, caplog.at_level(logging.ERROR, "jaxpp.serve"):
        response = running.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "req-7"})
        error = error_of(response, 500)
        assert error["type"] == "server_error" and "req-7" in error["message"] and "secret" not in response.text
        assert "req-7" in caplog.text and "secret details" in caplog.text
        error_of(running.post(stream=True), 500)  # it failed before the stream began
    broken = FakeEngine(lambda prompt, sampling: b"ab")
    with serving(broken) as running:
        text = running.post(stream=True).text
        assert text.count('"text":') == 2 and '"type":"server_error"' in text and "secret" not in text


def test_a_failure_of_ours_is_a_500_too(monkeypatch: pytest.MonkeyPatch, tiny: Running) -> None:
    def fail(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(tiny.engine, "check", fail)
    response = tiny.post()
    assert error_of(response, 500)["code"] == "internal_error" and "secret" not in response.text


# Watching and ending


def test_metrics_tell_what_happened() -> None:
    engine = FakeEngine()
    with serving(engine) as running:
        running.post(prompt="abc", stream=True)
        running.post(prompt="abc")
        running.post(n=0)
        running.http.get("/made/up/by/a/client")
        page = metrics(running)
    assert page["jaxpp_slots"] == page["jaxpp_cache_pages"] == 4
    assert page["jaxpp_prompt_tokens_total"] == 6 and page["jaxpp_cached_prompt_tokens_total"] == 2
    assert page["jaxpp_new_tokens_total"] == 8  # with the two that end the answers
    assert page['jaxpp_requests_finished_total{reason="stop"}'] == 2
    assert page["jaxpp_time_to_first_token_seconds_count"] == 2
    assert page["jaxpp_inter_token_seconds_count"] == 4
    assert page['jaxpp_request_seconds_count{reason="stop"}'] == 2
    assert page['jaxpp_http_responses_total{code="200",route="/v1/completions"}'] == 2
    assert page['jaxpp_http_responses_total{code="400",route="/v1/completions"}'] == 1
    assert page['jaxpp_http_responses_total{code="404",route="other"}'] == 1


def test_closing_lets_running_answers_end_and_refuses_new_ones() -> None:
    engine = FakeEngine(step_s=0.02)
    running = Running(engine)
    answers = list[str]()
    body = {"prompt": "to the end please", "stream": True, "max_tokens": 17}
    with running.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        answers.append(next(lines))
        running.server.stop(10.0)
        assert running.http.get("/health").status_code == 503
        assert error_of(running.post(prompt="a"), 503)["code"] == "closing"
        answers += lines
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in answers) == "TO THE END PLEASE"
    running.thread.join(10)
    assert not running.thread.is_alive() and engine.num_open == 0


def test_closing_cancels_what_does_not_end_in_time() -> None:
    engine = FakeEngine(endless, step_s=0.005)
    running = Running(engine)
    body = {"prompt": "a", "stream": True, "max_tokens": 2000}
    with running.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        running.server.stop(0.1)
        assert '"code":"closing"' in [line for line in lines if line][-1]
    running.thread.join(10)
    assert not running.thread.is_alive() and engine.num_open == 0


def test_an_engine_that_closed_by_itself_is_not_healthy() -> None:
    engine = FakeEngine()
    with serving(engine) as running:
        engine.close()
        assert running.http.get("/health").status_code == 503
        assert error_of(running.post(), 503)["code"] == "closing"


PROCESS = """
from jaxpp.server import listen
from jaxpp.server.app import ServerSettings, make_app
from tests.server.fake_engine import FakeEngine, endless

engine, port = FakeEngine(endless, step_s=0.005), listen.bind("127.0.0.1", 0)
say = lambda: print(port.getsockname()[1], flush=True)
listen.serve(make_app(engine, ServerSettings(), "tiny"), engine, port, 60.0, say)
print("slots held:", engine.num_open)
"""


@pytest.mark.timeout(60)
def test_a_signal_drains_and_a_second_one_does_not_wait() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        body = {"prompt": "a", "stream": True, "max_tokens": 2000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
            assert '"text":' in next(line for line in lines if line)
            process.send_signal(signal.SIGINT)
            assert '"code":"closing"' in [line for line in lines if line][-1]
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "slots held: 0\n", "")


# The command


def test_a_port_in_use_is_refused_with_the_way_out() -> None:
    with listen.bind("127.0.0.1", 0) as taken, pytest.raises(ValueError, match="is in use; choose another with --port"):
        listen.bind("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(("host", "port", "words"), [("127.0.0.1", 70_000, "0 to 65535"), ("203.0.113.9", 0, "--host")])
def test_an_address_that_is_not_ours_is_refused(host: str, port: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        listen.bind(host, port)


def test_only_loopback_is_private() -> None:
    assert [listen.is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "host")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "find_spec", lambda name: None if name == "fastapi" else object())
    with pytest.raises(ValueError, match=r"fastapi: pip install 'jaxpp-toolkit\[serve\]'"):
        listen.require_packages()


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    one = serve_commands.add_parser(parser.add_subparsers(dest="name"))
    one.set_defaults(overrides=[], accept="", mesh="data:1", dtype="", cpu_devices=0)  # what all commands take
    return parser.parse_args(["serve", "checkpoint", *words])


def test_a_port_in_use_is_told_before_a_checkpoint_is_opened() -> None:
    with listen.bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(ValueError, match=f"port {port} is in use; choose another with --port"):
            serve_commands.serve(command("--port", port))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--api-key-env", "JAXPP_NO_SUCH_KEY"), "JAXPP_NO_SUCH_KEY holds no key"),
        (("--api-key-file", "no/such/file"), "cannot be read"),
        (("--api-key-env", "A", "--api-key-file", "b"), "give one of them"),
        (("--slots", "0"), "--slots 0: 1 or more"),
        (("--timeout", "-1"), "--timeout -1: 0 or more seconds"),
    ],
)
def test_wrong_options_are_told_before_anything_is_done(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve_commands.serve(command(*words))


@pytest.mark.parametrize(
    ("words", "warns"),
    [(("--host", "0.0.0.0"), True), ((), False), (("--host", "0.0.0.0", "--api-key-file", "key"), False)],
)
def test_the_command_serves_and_warns_where_all_may_come(
    words: tuple[str, ...], warns: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    engine, seen = FakeEngine(), dict[str, Any]()
    (tmp_path / "key").write_text("sesame\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_commands, "opened", lambda arguments: SimpleNamespace(name="org/tiny"))
    monkeypatch.setattr(serve_commands, "loaded", lambda arguments, checkpoint: "model")
    stand_in = SimpleNamespace(Engine=lambda model, **settings: seen.update(settings) or engine)
    monkeypatch.setitem(sys.modules, "jaxpp.serve.engine", stand_in)
    monkeypatch.setattr(listen, "serve", lambda app, engine, port, drain_s, ready: ready())
    assert serve_commands.serve(command("--port", "0", "--slots", "3", "--queue", "9", *words)) == 0
    engine.close()
    out, err = capsys.readouterr()
    assert "org/tiny is served on http://" in out and ("warning: whoever reaches" in err) is warns
    assert (seen["slots"], seen["max_queue"]) == (3, 9)
