"""``jaxpp serve``: a checkpoint of any format behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpp.commands import add_draft, loaded, loaded_draft, opened, refuse_overrides

if TYPE_CHECKING:
    from jaxpp.server.app import ServerSettings


def serve(arguments: argparse.Namespace) -> int:
    """Serve a checkpoint of any format over HTTP, as OpenAI's API: completions, chat, models; health and metrics."""
    from jaxpp.server import listen

    refuse_overrides(arguments)
    listen.require_packages()
    settings = _settings(arguments)
    port = listen.bind(arguments.host, arguments.port)  # before weights are read, which takes a while
    try:
        return _serve(arguments, settings, port)
    finally:
        port.close()


def _serve(arguments: argparse.Namespace, settings: ServerSettings, port: Any) -> int:
    import jax

    from jaxpp.serve.engine import Engine
    from jaxpp.server import listen
    from jaxpp.server.app import make_app

    checkpoint = opened(arguments)
    model = loaded(arguments, checkpoint)
    if jax.process_count() > 1:
        raise ValueError(f"serve runs in one process, and here are {jax.process_count()}; start it without a launcher")
    engine = Engine(
        model, slots=arguments.slots, max_context=arguments.max_context, max_queue=arguments.queue,
        kv_dtype=arguments.kv_dtype, kv_split=arguments.kv_split, draft=loaded_draft(arguments),
        draft_tokens=arguments.draft_tokens,
    )  # fmt: skip
    print(f"compiled {engine.warm_up()} shapes", file=sys.stderr, flush=True)
    name = arguments.model_name or checkpoint.name
    app = make_app(engine, settings, name)

    def say() -> None:
        host, number = port.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"{name} is served on http://{shown}:{number}/v1 (health, metrics beside it; ctrl-c ends)", flush=True)
        if not settings.api_key and not listen.is_loopback(host):
            print(f"warning: whoever reaches {shown}:{number} may use it; ask for a key with --api-key-env or "
                  "--api-key-file", file=sys.stderr, flush=True)  # fmt: skip

    listen.serve(app, engine, port, arguments.drain, say)
    return 0


def _settings(arguments: argparse.Namespace) -> ServerSettings:
    from jaxpp.server.app import ServerSettings

    for option, value in (("--timeout", arguments.timeout), ("--drain", arguments.drain)):
        if value < 0:
            raise ValueError(f"{option} {value:g}: 0 or more seconds are needed")
    for option, value in (("--max-body-kb", arguments.max_body_kb), ("--slots", arguments.slots),
                          ("--queue", arguments.queue), ("--max-choices", arguments.max_choices)):  # fmt: skip
        if value < 1:
            raise ValueError(f"{option} {value}: 1 or more is needed")
    return ServerSettings(
        api_key=_key(arguments.api_key_env, arguments.api_key_file), timeout_s=arguments.timeout or None,
        max_body_bytes=arguments.max_body_kb * 1024, max_choices=arguments.max_choices,
    )  # fmt: skip


def _key(variable: str, file: str) -> str:
    """Return the key; never from the command line, which every user of the machine can read."""
    if variable and file:
        raise ValueError("--api-key-env and --api-key-file: give one of them")
    if not variable and not file:
        return ""
    if variable:
        key, source = os.environ.get(variable, ""), f"--api-key-env: the variable {variable}"
    else:
        try:
            key, source = Path(file).expanduser().read_text(encoding="utf-8"), f"--api-key-file {file}"
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {file} cannot be read: {error}") from error
    if not key.strip():
        raise ValueError(f"{source} holds no key; without one, leave the option out")
    if len(key.split()) > 1:
        raise ValueError(f"{source} holds more than one word; one key is taken")
    return key.strip()


def add_parser(names: Any) -> argparse.ArgumentParser:
    """Add ``serve`` to the command line."""
    one = names.add_parser("serve", help=serve.__doc__, description=serve.__doc__)
    one.set_defaults(function=serve)
    one.add_argument("path", metavar="CHECKPOINT", help="of any format, or a training run")
    where = one.add_argument_group("where")
    where.add_argument("--host", default="127.0.0.1", help="address to listen on; by default this machine alone")
    where.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed")
    where.add_argument("--model-name", default="", metavar="NAME", help="as clients call it; the checkpoint by default")
    who = one.add_argument_group("who")
    who.add_argument("--api-key-env", default="", metavar="NAME", help="variable that holds the key clients must send")
    who.add_argument("--api-key-file", default="", metavar="FILE", help="file that holds it")
    limits = one.add_argument_group("limits")
    limits.add_argument("--slots", type=int, default=8, help="requests that run at once")
    limits.add_argument("--max-context", type=int, default=0, help="tokens of prompt and answer; by default up to 2048")
    limits.add_argument(
        "--kv-dtype", default="", choices=("", "float32", "bfloat16", "float16", "int8"),
        help="of keys and values; int8 takes less room; by default that of the weights",
    )  # fmt: skip
    limits.add_argument("--queue", type=int, default=256, help="requests that wait; more are told to come later (429)")
    limits.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for an answer, its wait included; 0: none"
    )
    limits.add_argument("--max-body-kb", type=int, default=4096, help="size of a request, in KiB")
    limits.add_argument("--max-choices", type=int, default=64, help="answers to one request: prompts times n")
    limits.add_argument("--drain", type=float, default=30.0, help="seconds that running requests get at the end")
    add_draft(limits)
    return one
