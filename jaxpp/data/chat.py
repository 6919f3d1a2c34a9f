"""Chat templates: a conversation to text, as the jinja2 template that a checkpoint carries writes it.

A template is code from the internet. It runs in jinja2's immutable sandbox: it reads what it is given and can reach
neither attributes of Python nor files. Its output is bounded and so is each `range` (100,000 by the sandbox);
the time that nested loops may take is not.
"""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2

_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

MAX_CHARACTERS = 10_000_000
"""Longest text that a template may write."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Return the text of a conversation.

    Encode it with `special=True` and without another begin of text: the template has written its special tokens.

    Args:
        template: jinja2 source, as in ``tokenizer_config.json``.
        messages: each with ``role`` and ``content``, oldest first.
        add_generation_prompt: end with the opening of the assistant's turn.
        tools: functions that the model may call, in the format of the template.
        variables: what else the template reads, such as ``bos_token`` and ``eos_token``.

    Raises:
        ValueError: the template is malformed, reaches out of the sandbox, uses what is not defined, refuses the
            messages or writes too much; with the template's line.
    """
    import jinja2

    values = {"messages": list(messages), "tools": tools, "documents": None, **variables}
    pieces: list[str] = []
    length = 0
    try:
        compiled = _environment().from_string(template)
        for piece in compiled.generate(add_generation_prompt=add_generation_prompt, **values):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_CHARACTERS:
                break
    except _FAILURES + (jinja2.TemplateError,) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"chat template, line {_line(error)}: {reason}") from error
    if length > MAX_CHARACTERS:
        raise ValueError(f"chat template: it writes more than {MAX_CHARACTERS:,} characters; it may never end")
    return "".join(pieces)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Return the environment that published templates are written for, in a sandbox."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks the assistant's words for training; here it writes them and no more."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            # jinja2 writes an empty text here and complains only when the value is used further.
            raise jinja2.exceptions.SecurityError(f"{attribute!r} of a {type(obj).__name__} lies outside the sandbox")

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """Write JSON as it is: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _line(error: Exception) -> int:
    """Return the line of the template where it failed; jinja2 writes the template's lines into the traceback."""
    places = traceback.extract_tb(error.__traceback__)
    lines = [place.lineno or 1 for place in places if place.filename in ("<template>", "<unknown>")]
    return getattr(error, "lineno", None) or [1, *lines][-1]
