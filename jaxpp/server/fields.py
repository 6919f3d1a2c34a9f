"""Fields of a JSON body, read with their types; a mistake names the field, what was given and what is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

Body = Mapping[str, Any]

MAX_INTEGER = 2**63 - 1


class ApiError(Exception):
    """What a client is told went wrong, as the API writes it.

    Args:
        status: HTTP code.
        message: for people.
        param: the field that is wrong.
        code: for programs.
        kind: the API's ``type``.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})
        self._described = {"message": message, "type": kind, "param": param, "code": code}

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response, and of an event in a stream."""
        return {"error": self._described}


def read_json(raw: bytes) -> dict[str, Any]:
    """Return the object that a body holds.

    Raises:
        ApiError: 400: it is not UTF-8, not JSON or no object.
    """
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is text in Python alone
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body escapes half a surrogate pair, which is no character") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {kind_of(value)}; an object is needed")
    return value


def kind_of(value: Any) -> str:
    """Say what a JSON value is."""
    kinds = {bool: "a boolean", int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


def wrong(name: str, value: Any, needed: str) -> NoReturn:
    """Refuse a value for its type.

    Raises:
        ApiError: always.
    """
    raise ApiError(400, f"{name} is {kind_of(value)}; {needed} is needed", param=name)


def integer(body: Body, name: str, default: int) -> int:
    """Return a whole number of 64 bits; a boolean is none."""
    value = body.get(name, default)
    if type(value) is not int:
        wrong(name, value, "an integer")
    if not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
        raise ApiError(400, f"{name} has more than 64 bits", param=name)
    return value


def number(value: Any, name: str) -> float:
    """Return a finite number."""
    if type(value) not in (int, float):
        wrong(name, value, "a number")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ApiError(400, f"{name} is too large for a number", param=name)
    return value


def boolean(body: Body, name: str, default: bool = False) -> bool:
    """Return a boolean; 0 and 1 are none."""
    value = body.get(name, default)
    return value if type(value) is bool else wrong(name, value, "a boolean")


def texts(value: Any, name: str) -> list[str]:
    """Return the texts of a list, or the one text as a list."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list):
        wrong(name, value, "a text or a list of texts")
    for i, one in enumerate(values):
        if not isinstance(one, str):
            wrong(f"{name}[{i}]", one, "a text")
    return values


def ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """Return a list of token ids."""
    if not isinstance(value, list):
        wrong(name, value, "a list of token ids")
    for i, one in enumerate(value):
        if type(one) is not int:
            wrong(f"{name}[{i}]", one, "a token id")
        if not 0 <= one < vocab_size:
            raise ApiError(400, f"{name}[{i}] is {one}; the ids of this model are 0 to {vocab_size - 1}", param=name)
    return value


def mapping(value: Any, name: str) -> dict[str, Any]:
    """Return an object."""
    return value if isinstance(value, dict) else wrong(name, value, "an object")


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")
