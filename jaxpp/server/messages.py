"""The messages of a chat body, as a chat template reads them."""

from __future__ import annotations

import json
from typing import Any

from jaxpp.names import unknown
from jaxpp.server.fields import ApiError, Body, mapping, wrong

# A developer's message is what a system's was called before; templates know the old word.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "annotations", "audio",
        "function_call")  # fmt: skip
REFUSED = ("audio", "function_call")  # they stand in a message that a client sends back, with nothing in them


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return messages for the template: each content one text, the arguments of tool calls as objects.

    Raises:
        ApiError: 400, with the place of what is wrong.
    """
    if not isinstance(value, list):
        wrong("messages", value, "a list of messages")
    if not value:
        raise ApiError(400, "messages is empty; one or more are needed", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _message(value: Any, place: str) -> dict[str, Any]:
    given = {key: entry for key, entry in mapping(value, place).items() if entry is not None}
    for key in given:
        if key not in KEYS:
            raise ApiError(400, unknown(f"{place}: unknown field", key, KEYS), param=place)
        if key in REFUSED:
            raise ApiError(400, f"{place}.{key} is not offered here; leave it out", param=f"{place}.{key}")
    role = given.get("role")
    if not isinstance(role, str):
        wrong(f"{place}.role", role, "a text")
    if role not in ROLES:
        raise ApiError(400, unknown(f"{place}.role: unknown", role, ROLES), param=f"{place}.role")
    if "content" not in given and "tool_calls" not in given:
        wrong(f"{place}.content", None, "a text or a list of text parts")
    message = {**given, "role": ROLES[role], "content": _content(given.get("content", ""), f"{place}.content")}
    if "tool_calls" in given:
        message["tool_calls"] = _calls(given["tool_calls"], f"{place}.tool_calls")
    return message


def _content(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        wrong(place, value, "a text or a list of text parts")
    parts = []
    for i, part in enumerate(value):
        kind, text = mapping(part, f"{place}[{i}]").get("type"), part.get("text")
        if kind != "text":
            raise ApiError(400, f"{place}[{i}].type is {json.dumps(kind)}; only text is read here",
                           param=f"{place}[{i}].type")  # fmt: skip
        parts.append(text if isinstance(text, str) else wrong(f"{place}[{i}].text", text, "a text"))
    return "\n".join(parts)


def _calls(value: Any, place: str) -> list[Body]:
    """Templates write the arguments as JSON themselves; as text they would be quoted twice."""
    if not isinstance(value, list):
        wrong(place, value, "a list of tool calls")
    calls = []
    for i, call in enumerate(value):
        function = mapping(mapping(call, f"{place}[{i}]").get("function"), f"{place}[{i}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise ApiError(400, f"{place}[{i}].function.arguments is not JSON", param=place) from None
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls
