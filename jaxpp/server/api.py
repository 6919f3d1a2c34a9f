"""The bodies of completions and chat completions, read into prompts and `Sampling`. Every mistake is named.

What would change the answer and is not offered is refused; what changes nothing (``user``, ``store``) is accepted.
Beyond OpenAI's own fields: ``top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids``, and
``chat_template_kwargs`` for what the chat template reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxpp.data import Tokenizer
from jaxpp.names import unknown
from jaxpp.serve.request import MAX_LOGPROBS, Sampling
from jaxpp.server import fields
from jaxpp.server.fields import ApiError, Body
from jaxpp.server.messages import read_messages

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own; a chat's answer may fill the context
MAX_STOP_CHARACTERS = 1000  # of one stop text: what could be its beginning is held back

SAMPLED = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logprobs",
)  # fmt: skip
COMMON = ("model", "n", "stream", "stream_options", *SAMPLED)
CHAT = (*COMMON, "messages", "tools", "tool_choice", "top_logprobs", "max_completion_tokens", "chat_template_kwargs")
COMPLETION = (*COMMON, "prompt", "echo", "best_of")
HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_options", "prompt_cache_retention", "prediction")  # fmt: skip

# Not offered: the values beside null that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "verbosity": ("medium",),
    "reasoning_effort": (),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
}

# Variables of a chat template that the server sets, and names of our own arguments.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "template", "self")

# Fields of `Sampling` that the API calls otherwise.
SPELLED = {"stop_ids": "stop_token_ids", "ignore_ends": "ignore_eos"}


@dataclass(frozen=True)
class Offer:
    """What is served, as far as bodies are checked against it.

    Args:
        model_name: the one model's.
        tokenizer: None: only token ids are taken.
        vocab_size: ids are below.
        max_context: most tokens of prompt and answer together.
        max_choices: most answers to one body.
    """

    model_name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    max_context: int
    max_choices: int


@dataclass(frozen=True)
class Order:
    """What a body asks for.

    Args:
        chat: the route.
        prompts: token ids of each prompt.
        samplings: of the answers that each prompt gets.
        echo: the text of each prompt, to stand in front of its answers; empty: it does not.
        stream: pieces, as they come.
        include_usage: end the stream with the tokens that were used.
    """

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    echo: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.samplings[0].logprobs is not None


def read_order(chat: bool, body: Body, offer: Offer) -> Order:
    """Read a body; it takes as long as the prompt takes to encode.

    Args:
        chat: whether it came to the chat route.
        body: the JSON object.
        offer: what is served.

    Raises:
        ApiError: 400 or 404, with the field.
    """
    _check_names(chat, body)
    body = {name: value for name, value in body.items() if value is not None}
    _check_model(body, offer)
    stream = fields.boolean(body, "stream")
    include_usage = _include_usage(body, stream)
    if chat:
        prompts, echo = [_chat_prompt(body, offer)], []
    else:
        prompts, echo = _prompts(body, offer)
    n = _num_choices(body, len(prompts), offer)
    longest = max(map(len, prompts))
    max_tokens = _max_tokens(chat, body, longest, offer)
    first = _sampling(chat, body, max_tokens, offer)
    samplings = [_reseeded(first, j) for j in range(n)]
    return Order(chat, tuple(map(tuple, prompts)), tuple(samplings), tuple(echo), stream, include_usage)


def _check_names(chat: bool, body: Body) -> None:
    known = CHAT if chat else COMPLETION
    for name, value in body.items():
        if name in known or name in HARMLESS:
            continue
        if name not in REFUSED:
            message = unknown("unknown field", name, (*known, *HARMLESS))
            raise ApiError(400, message, param=name, code="unknown_parameter")
        if value is not None and value not in REFUSED[name]:
            _refuse(name, value)


def _refuse(name: str, value: Any) -> None:
    given = json.dumps(value, ensure_ascii=False)
    given = given if len(given) <= 60 else fields.kind_of(value)
    raise ApiError(400, f"{name} {given} is not offered here; leave it out", param=name, code="unsupported_parameter")


def _check_model(body: Body, offer: Offer) -> None:
    model = body.get("model", offer.model_name)
    if not isinstance(model, str):
        fields.wrong("model", model, "a text")
    check_model(model, offer.model_name)


def check_model(model: str, served: str) -> None:
    """Refuse any model but the one that is served.

    Raises:
        ApiError: 404.
    """
    if model != served:
        raise ApiError(404, unknown("unknown model", model, [served], "served"), param="model", code="model_not_found")


def _include_usage(body: Body, stream: bool) -> bool:
    if "stream_options" not in body:
        return False
    if not stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    options = fields.mapping(body["stream_options"], "stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            message = unknown("stream_options: unknown field", name, ["include_usage"])
            raise ApiError(400, message, param="stream_options", code="unknown_parameter")
    return fields.boolean({k: v for k, v in options.items() if v is not None}, "include_usage")


def _chat_prompt(body: Body, offer: Offer) -> list[int]:
    if "messages" not in body:
        raise ApiError(400, "messages is needed", param="messages")
    messages = read_messages(body["messages"])
    tokenizer = _tokenizer(offer, "messages")
    variables = fields.mapping(body.get("chat_template_kwargs", {}), "chat_template_kwargs")
    for name in RESERVED:
        if name in variables:
            raise ApiError(400, f"chat_template_kwargs: {name} is not yours to set", param="chat_template_kwargs")
    tools = _tools(body, tokenizer)
    try:
        return [int(i) for i in tokenizer.chat(messages, **{**variables, "tools": tools})]
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error


def _tools(body: Body, tokenizer: Tokenizer) -> list[Any] | None:
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        _refuse("tool_choice", choice)
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        fields.wrong("tools", tools, "a list of tools")
    for i, tool in enumerate(tools):
        fields.mapping(tool, f"tools[{i}]")
    if not tools or choice == "none":
        return None
    if "tools" not in (tokenizer.chat_template or ""):
        raise ApiError(400, "tools: the chat template of this model does not know them; leave them out", param="tools",
                       code="unsupported_parameter")  # fmt: skip
    return tools


def _prompts(body: Body, offer: Offer) -> tuple[list[list[int]], list[str]]:
    """Return the ids of each prompt, and the texts where they are to be echoed."""
    value = body.get("prompt")
    if value is None:
        raise ApiError(400, "prompt is needed", param="prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
        said = fields.texts(value, "prompt")
        tokenizer = _tokenizer(offer, "prompt")
        prompts = [[int(i) for i in tokenizer.encode(text, begin=True)] for text in said]
    elif not isinstance(value, list):
        fields.wrong("prompt", value, "a text, a list of texts, or token ids")
    else:
        nested = bool(value) and isinstance(value[0], list)
        given = [(one, f"prompt[{i}]") for i, one in enumerate(value)] if nested else [(value, "prompt")]
        prompts = [fields.ids(one, name, offer.vocab_size) for one, name in given]
        said = None
    if not all(prompts):
        raise ApiError(400, "prompt is empty; one token or more is needed", param="prompt")
    if not fields.boolean(body, "echo"):
        return prompts, []
    if "logprobs" in body:
        raise ApiError(400, "echo with logprobs is not offered: those of a prompt are not kept", param="echo",
                       code="unsupported_parameter")  # fmt: skip
    return prompts, said or [_tokenizer(offer, "echo").decode(prompt) for prompt in prompts]


def _tokenizer(offer: Offer, name: str) -> Tokenizer:
    if offer.tokenizer is None:
        raise ApiError(400, f"{name}: this model has no tokenizer; give a prompt of token ids", param=name)
    return offer.tokenizer


def _num_choices(body: Body, num_prompts: int, offer: Offer) -> int:
    n = fields.integer(body, "n", 1)
    most = offer.max_choices // num_prompts
    if not most:
        message = f"prompt holds {num_prompts} prompts; {offer.max_choices} or fewer are taken"
        raise ApiError(400, message, param="prompt")
    if not 1 <= n <= most:
        of = f" of each of {num_prompts} prompts" if num_prompts > 1 else ""
        raise ApiError(400, f"n {n}: 1 to {most} answers{of} are offered", param="n")
    if (best_of := fields.integer(body, "best_of", n)) != n:
        message = f"best_of {best_of} with n {n}: answers are not ranked here; leave best_of out"
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")
    return n


def _max_tokens(chat: bool, body: Body, longest: int, offer: Offer) -> int:
    """Return how long an answer may be; both must fit the context together."""
    room = offer.max_context - longest
    default = max(room, 1) if chat else max(min(DEFAULT_COMPLETION_TOKENS, room), 1)
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    asked = fields.integer(body, name, default)
    if asked < 1:
        raise ApiError(400, f"{name} {asked}: 1 or more is needed", param=name)
    if asked > room:
        fix = f"{room} can be added" if room > 0 else f"{offer.max_context - 1} of a prompt leave room for one"
        raise ApiError(
            400, f"the prompt has {longest} tokens and {name} is {asked}, {longest + asked} together; "
            f"the most is {offer.max_context}: {fix}",
            param="messages" if chat else "prompt", code="context_length_exceeded",
        )  # fmt: skip
    return asked


def _sampling(chat: bool, body: Body, max_tokens: int, offer: Offer) -> Sampling:
    values: dict[str, Any] = {"max_tokens": max_tokens}
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if name in body:
            values[name] = fields.number(body[name], name)
    for name in ("top_k", "min_tokens", "seed"):
        if name in body:
            values[name] = fields.integer(body, name, 0)
    if "top_k" in values:
        values["top_k"] = min(values["top_k"], offer.vocab_size)
    values["stop"] = _stops(body, offer)
    values["stop_ids"] = tuple(fields.ids(body.get("stop_token_ids", []), "stop_token_ids", offer.vocab_size))
    values["logit_bias"] = _biases(body, offer.vocab_size)
    values["ignore_ends"] = fields.boolean(body, "ignore_eos")
    values["logprobs"] = _chat_logprobs(body) if chat else _completion_logprobs(body)
    try:
        sampling = Sampling(**values)
    except ValueError as error:
        word, _, rest = str(error).partition(" ")
        name = SPELLED.get(word, word)
        raise ApiError(400, f"{name} {rest}", param=name) from error
    return sampling


def _stops(body: Body, offer: Offer) -> tuple[str, ...]:
    stops = tuple(fields.texts(body.get("stop", []), "stop"))
    if stops:
        _tokenizer(offer, "stop")
    for stop in stops:
        if len(stop) > MAX_STOP_CHARACTERS:
            message = f"stop holds a text of {len(stop):,} characters; {MAX_STOP_CHARACTERS:,} or fewer are taken"
            raise ApiError(400, message, param="stop")
    return stops


def _biases(body: Body, vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, value in fields.mapping(body.get("logit_bias", {}), "logit_bias").items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            message = f'logit_bias names "{key[:40]}"; the ids of this model are 0 to {vocab_size - 1}'
            raise ApiError(400, message, param="logit_bias")
        biases[int(key)] = fields.number(value, "logit_bias")
    return biases


def _chat_logprobs(body: Body) -> int | None:
    asked = fields.boolean(body, "logprobs")
    if "top_logprobs" not in body:
        return 0 if asked else None
    most = _alternatives(body, "top_logprobs")
    if not asked:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return most


def _completion_logprobs(body: Body) -> int | None:
    return _alternatives(body, "logprobs") if "logprobs" in body else None


def _alternatives(body: Body, name: str) -> int:
    count = fields.integer(body, name, 0)
    if not 0 <= count <= MAX_LOGPROBS:
        raise ApiError(400, f"{name} {count}: 0 to {MAX_LOGPROBS} is needed", param=name)
    return count


def _reseeded(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling of one of n answers: seed, seed + 1, ..., folded into 31 bits, which any device holds."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) % 2**31)
