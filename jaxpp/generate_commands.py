"""``jaxpp generate``: text from a checkpoint of any format: a prompt, a file of prompts, a conversation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpp import runtime
from jaxpp.commands import add_draft, loaded, loaded_draft, opened, refuse_overrides
from jaxpp.data.tokenizer import required

if TYPE_CHECKING:
    from jaxpp.data import Tokenizer
    from jaxpp.pretrained import Checkpoint
    from jaxpp.serve.engine import Engine
    from jaxpp.serve.request import Sampling


def generate(arguments: argparse.Namespace) -> int:
    """Continue a prompt with a checkpoint of any format, a file of prompts, or talk with it (--chat)."""
    from jaxpp.serve.limits import check_length

    refuse_overrides(arguments)
    sampling = _sampling(arguments)
    checkpoint = opened(arguments)
    tokenizer = required(checkpoint.tokenizer())
    if arguments.chat and tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; a base model continues text: leave --chat out")
    prompts = _prompts(arguments, tokenizer)
    if prompts is None:
        return _converse(_engine(arguments, checkpoint, 1, arguments.max_context), tokenizer, sampling, arguments)
    longest = arguments.max_context or checkpoint.config.max_positions
    for _, ids in prompts:  # before weights are read, which takes a while
        check_length(ids, sampling, longest, checkpoint.config.vocab_size)
    context = max(len(ids) for _, ids in prompts) + sampling.max_tokens
    engine = _engine(arguments, checkpoint, min(arguments.slots, len(prompts)), arguments.max_context or context)
    if arguments.prompts:
        return _answer_all(engine, prompts, sampling)
    text, ids = prompts[0]
    _say("" if arguments.chat else text)
    _stream(engine, ids, sampling)
    return 0


def _sampling(arguments: argparse.Namespace) -> Sampling:
    from jaxpp.serve.request import Sampling

    return Sampling(
        max_tokens=arguments.max_new_tokens, temperature=arguments.temperature, top_k=arguments.top_k,
        top_p=arguments.top_p, min_p=arguments.min_p, repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty, frequency_penalty=arguments.frequency_penalty,
        seed=arguments.seed, stop=tuple(arguments.stop), ignore_ends=arguments.ignore_ends,
    )  # fmt: skip


def _prompts(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[tuple[str, list[int]]] | None:
    """Return texts and their ids; None where they come from the keyboard."""
    if arguments.prompt is not None and arguments.prompts:
        raise ValueError("--prompt and --prompts: give one of them")
    if arguments.prompt is None and not arguments.prompts:
        if not arguments.chat:
            raise ValueError("there is no prompt: give --prompt TEXT, --prompts FILE, or --chat to talk")
        return None
    texts = [arguments.prompt] if arguments.prompt is not None else _lines(arguments.prompts)

    def ids(text: str) -> list[int]:
        messages = _opening(arguments) + [{"role": "user", "content": text}]
        return (tokenizer.chat(messages) if arguments.chat else tokenizer.encode(text, begin=True)).tolist()

    return [(text, ids(text)) for text in texts]


def _opening(arguments: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def _lines(name: str) -> list[str]:
    """Read prompts, one to a line; in a .jsonl file each line is an object with a "prompt"."""
    try:
        lines = [line for line in Path(name).expanduser().read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {name} cannot be read: {error}") from error
    if not lines:
        raise ValueError(f"--prompts {name} holds no prompt; one to a line is needed")
    if not name.endswith(".jsonl"):
        return lines
    try:
        return [str(json.loads(line)["prompt"]) for line in lines]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f'--prompts {name}: each line must be an object like {{"prompt": "..."}}') from None


def _engine(arguments: argparse.Namespace, checkpoint: Checkpoint, slots: int, context: int) -> Engine:
    from jaxpp.serve.engine import Engine
    from jaxpp.serve.limits import batch_shards, execution_of

    model, draft = loaded(arguments, checkpoint), loaded_draft(arguments)
    shards = batch_shards(execution_of(model, arguments.kv_split))
    return Engine(
        model, slots=-(-slots // shards) * shards, max_context=context, kv_dtype=arguments.kv_dtype,
        kv_split=arguments.kv_split, draft=draft, draft_tokens=arguments.draft_tokens,
    )  # fmt: skip


def _stream(engine: Engine, ids: list[int], sampling: Sampling) -> str:
    """Write an answer as it comes, and return it."""
    said = ""
    for _, delta in engine.deltas([ids], sampling):
        if delta.finish == "error":
            raise ValueError(delta.error)
        said += delta.text
        _say(delta.text)
    _say("\n")
    return said


def _say(text: str) -> None:
    if runtime.is_main():  # every process runs the model; one speaks
        print(text, end="", flush=True)


def _answer_all(engine: Engine, prompts: Sequence[tuple[str, list[int]]], sampling: Sampling) -> int:
    """Answer all prompts at once; print one JSON object for each, in their order."""
    answers = engine.generate([ids for _, ids in prompts], sampling)
    for (text, ids), answer in zip(prompts, answers, strict=True):
        values = {"prompt": text, "text": answer.text, "finish": answer.finish}
        counts = {"prompt_tokens": len(ids), "new_tokens": len(answer.tokens)}
        _say(json.dumps({**values, **counts}, ensure_ascii=False) + "\n")
    return 0


def _converse(engine: Engine, tokenizer: Tokenizer, sampling: Sampling, arguments: argparse.Namespace) -> int:
    """Talk in turns, until the end of the input; what was said before stays in the cache."""
    import jax

    if jax.process_count() > 1:
        raise ValueError("a conversation runs in one process; give --prompt where there are several")
    messages = _opening(arguments)
    for line in _turns():
        if line == "/new":
            messages = _opening(arguments)
            continue
        messages.append({"role": "user", "content": line})
        try:
            said = _stream(engine, tokenizer.chat(messages).tolist(), sampling)
        except ValueError as error:  # too long, mostly: the conversation can go on without the last turn
            print(f"jaxpp: {error}; /new begins anew", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": said})
    return 0


def _turns() -> Iterator[str]:
    if sys.stdin.isatty():
        print("an empty line is skipped, /new begins anew, ctrl-d ends", file=sys.stderr)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line.strip()


def add_parser(names: Any) -> argparse.ArgumentParser:
    """Add ``generate`` to the command line."""
    one = names.add_parser("generate", help=generate.__doc__, description=generate.__doc__)
    one.set_defaults(function=generate)
    one.add_argument("path", metavar="CHECKPOINT")
    one.add_argument("--prompt", metavar="TEXT")
    one.add_argument(
        "--prompts", default="", metavar="FILE", help='one to a line, or .jsonl with a "prompt"; prints JSON'
    )
    one.add_argument("--chat", action="store_true", help="the prompt is a user's message; without one, talk in turns")
    one.add_argument("--system", default="", metavar="TEXT", help="with --chat: a message that comes first")
    one.add_argument("--max-new-tokens", "--max_new_tokens", type=int, default=100, metavar="N")
    drawing = one.add_argument_group("drawing")
    drawing.add_argument("--temperature", type=float, default=0.8, help="0: always the most probable token")
    drawing.add_argument("--top-k", "--top_k", type=int, default=50, metavar="K", help="0: all")
    drawing.add_argument("--top-p", "--top_p", type=float, default=1.0, metavar="P")
    drawing.add_argument("--min-p", "--min_p", type=float, default=0.0, metavar="P")
    drawing.add_argument("--repetition-penalty", "--repetition_penalty", type=float, default=1.0, metavar="X")
    drawing.add_argument("--presence-penalty", "--presence_penalty", type=float, default=0.0, metavar="X")
    drawing.add_argument("--frequency-penalty", "--frequency_penalty", type=float, default=0.0, metavar="X")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be repeated")
    drawing.add_argument("--ignore-ends", "--ignore_ends", action="store_true", help="go on after the end of text")
    running = one.add_argument_group("running")
    running.add_argument("--slots", type=int, default=8, help="prompts of a file that run at once")
    running.add_argument(
        "--max-context", "--max_context", type=int, default=0, metavar="N",
        help="tokens of prompt and answer; by default as needed, in a conversation up to 2048",
    )  # fmt: skip
    running.add_argument(
        "--kv-dtype", "--kv_dtype", default="", choices=("", "float32", "bfloat16", "float16", "int8"),
        help="of keys and values; by default that of the weights",
    )  # fmt: skip
    add_draft(running)
    return one
