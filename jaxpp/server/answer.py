"""Answers as the API writes them: chunks of a stream, and the body that a whole stream makes.

There is one way out: a body that is not streamed is its stream, collected (`collect`).
"""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxpp.serve.request import Delta, Token
from jaxpp.server.api import Order
from jaxpp.server.spelling import Spelling

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's own stand-in

Chunk = dict[str, Any]


class Writer:
    """Writes the chunks of one order's stream.

    Args:
        order: what is answered.
        model_name: as clients call it.
        fingerprint: of model and settings: equal ones draw equal answers.
        spelling: of single tokens.
    """

    def __init__(self, order: Order, model_name: str, fingerprint: str, spelling: Spelling) -> None:
        self._order, self._spelling = order, spelling
        self._head = {
            "id": f"{'chatcmpl' if order.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if order.chat else "text_completion",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": fingerprint,
        }
        self._offsets: dict[int, _Offsets] = {}
        self._opened: set[int] = set()
        self._num_tokens = 0

    def write(self, index: int, delta: Delta) -> Iterator[Chunk]:
        """Yield the chunks of a delta; the first of a choice is preceded by its opening.

        Args:
            index: of the choice.
            delta: what it has become.
        """
        self._num_tokens += len(delta.tokens)
        if index not in self._opened:
            self._opened.add(index)
            if self._order.chat:
                yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)
            elif self._order.echo:
                yield self._chunk(index, self._order.echo[index // len(self._order.samplings)], None, None)
        logprobs = self._logprobs(index, delta.tokens) if self._order.logprobs and delta.tokens else None
        if delta.text or delta.finish or logprobs:
            said = delta.text if not self._order.chat else {"content": delta.text} if delta.text else {}
            yield self._chunk(index, said, logprobs, delta.finish)

    def usage(self, cached_tokens: int) -> Chunk:
        """Return the last chunk; a prompt counts once, however many answers it gets.

        Args:
            cached_tokens: of the prompts, those that were not computed.
        """
        prompt_tokens = sum(map(len, self._order.prompts))
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(self, index: int, said: Any, logprobs: Any, finish: str | None) -> Chunk:
        part = "delta" if self._order.chat else "text"
        return {
            **self._head,
            "choices": [{"index": index, part: said, "logprobs": logprobs, "finish_reason": finish}],
        }

    def _logprobs(self, index: int, tokens: Iterable[Token]) -> dict[str, Any]:
        if self._order.chat:
            return {"content": [self._described(token) for token in tokens], "refusal": None}
        spelled = self._spelling
        offsets = self._offsets.setdefault(index, _Offsets())
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            top: dict[str, float] = {}
            for other, logprob in (*token.top, (token.id, token.logprob or 0.0)):
                top.setdefault(spelled.text(other), _finite(logprob))
            columns["tokens"].append(spelled.text(token.id))
            columns["token_logprobs"].append(_finite(token.logprob or 0.0))
            columns["top_logprobs"].append(top)
            columns["text_offset"].append(offsets.next(spelled.bytes(token.id)))
        return columns

    def _described(self, token: Token) -> dict[str, Any]:
        top = [self._entry(other, logprob) for other, logprob in token.top]
        return {**self._entry(token.id, token.logprob or 0.0), "top_logprobs": top}

    def _entry(self, index: int, logprob: float) -> dict[str, Any]:
        spelled = self._spelling
        return {"token": spelled.text(index), "logprob": _finite(logprob), "bytes": list(spelled.bytes(index))}


class _Offsets:
    """Where the tokens of an answer begin in its text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, spelled: bytes) -> int:
        begin = self._length
        self._length += len(self._decoder.decode(spelled))
        return begin


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def collect(chunks: Iterable[Chunk]) -> dict[str, Any]:
    """Return the body that a whole stream makes.

    Args:
        chunks: of one order, the one with the usage last.
    """
    choices: dict[int, dict[str, Any]] = {}
    body: dict[str, Any] = {}
    for chunk in chunks:
        body = body or {**chunk}
        for piece in chunk["choices"]:
            _extend(choices.setdefault(piece["index"], {"index": piece["index"]}), piece)
        if "usage" in chunk:
            body["usage"] = chunk["usage"]
    body["object"] = body["object"].removesuffix(".chunk")
    body["choices"] = [choices[index] for index in sorted(choices)]
    return body


def _extend(choice: dict[str, Any], piece: Mapping[str, Any]) -> None:
    if "delta" in piece:
        message = choice.setdefault("message", {"role": "assistant", "content": "", "refusal": None})
        message["content"] += piece["delta"].get("content", "")
    else:
        choice["text"] = choice.get("text", "") + piece["text"]
    logprobs = piece["logprobs"] or {}
    if not choice.setdefault("logprobs", None) and logprobs:
        empty: Any = {name: None if values is None else [] for name, values in logprobs.items()}
        choice["logprobs"] = empty
    for name, values in logprobs.items():
        if values:
            choice["logprobs"][name].extend(values)
    choice["finish_reason"] = piece["finish_reason"]
