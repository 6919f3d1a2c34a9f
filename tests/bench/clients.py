"""Many clients for a while, against a real server: is anything lost, leaked, or changed by the others?

    python -m tests.bench.clients CHECKPOINT --clients 64 --seconds 120

Each client asks with a random prompt, length, seed and settings, and now and then hangs up in the middle. At the end no
slot and no page may be held, and a sample of the answers is asked for again, alone: each must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = (
    "the quick brown fox jumps over a lazy dog while rivers of copper light sing about engines and small models".split()
)


@dataclass
class Tally:
    """What the clients saw.

    Args:
        answers: request and text of each that ended.
        hung_up: answers that were left in the middle.
        refused: codes of what was refused.
        first_s: seconds to each first token.
        tokens: tokens of all answers that ended.
    """

    answers: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    hung_up: int = 0
    refused: list[int] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    tokens: int = 0


def body(draw: random.Random) -> dict[str, Any]:
    """Return a random request."""
    settings = draw.choice(
        [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 20}]
    )
    prompt = " ".join(draw.choices(WORDS, k=draw.randrange(1, 40)))
    return {"prompt": prompt, "max_tokens": draw.randrange(1, 48), "seed": draw.randrange(2**31), **settings}


async def ask(client: httpx.AsyncClient, asked: dict[str, Any], tally: Tally, leave_after: int | None) -> str | None:
    """Stream one answer; return its text, or None where it was left or refused."""
    begin, text, pieces = time.monotonic(), "", 0
    given = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=given) as response:
        if response.status_code != 200:
            tally.refused.append(response.status_code)
            return None
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk)
            if chunk.get("usage"):
                tally.tokens += chunk["usage"]["completion_tokens"]
            text += "".join(choice["text"] for choice in chunk["choices"])
            pieces += 1
            if pieces == 1:
                tally.first_s.append(time.monotonic() - begin)
            if leave_after is not None and pieces >= leave_after:
                tally.hung_up += 1
                return None
    return text


async def run(url: str, clients: int, seconds: float) -> Tally:
    """Let clients ask until the time is over."""
    tally, end = Tally(), time.monotonic() + seconds

    async def one(number: int) -> None:
        draw = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            while time.monotonic() < end:
                asked = body(draw)
                leaves = draw.randrange(1, 8) if draw.random() < 0.25 else None
                if (text := await ask(client, asked, tally, leaves)) is not None:
                    tally.answers.append((asked, text))

    await asyncio.gather(*(one(number) for number in range(clients)))
    return tally


async def alone(url: str, answers: list[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    """Ask again, one by one; return the requests whose answer changed."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return [asked for asked, text in answers if await ask(client, asked, Tally(), None) != text]


def held(url: str) -> dict[str, float]:
    """Return what the server still holds."""
    page = httpx.get(f"{url}/metrics").text
    found = re.findall(r"^(jaxpp\w*(?:waiting|running|pages_used)\w*)(?:\{[^}]*\})? ([0-9.e+]+)$", page, re.MULTILINE)
    return {name: float(value) for name, value in found}


def main() -> int:
    """Run a server and the clients; print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--again", type=int, default=100, help="answers that are asked for again, alone")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "jaxpp.cli", "serve", arguments.checkpoint, "--port", "0", "--max-context", "256"]
    server = subprocess.Popen([*command, "--slots", str(arguments.slots)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        url = re.search(r"http://[^/ ]+", server.stdout.readline())
        assert url
        tally = asyncio.run(run(url[0], arguments.clients, arguments.seconds))
        sample = random.Random(0).sample(tally.answers, min(arguments.again, len(tally.answers)))
        changed = asyncio.run(alone(url[0], sample))
        left = held(url[0])
    finally:
        server.terminate()
        server.wait(timeout=120)
    first = sorted(tally.first_s)
    print(
        f"{len(tally.answers)} answers of {tally.tokens:,} tokens ({tally.tokens / arguments.seconds:.0f} tokens/s), "
        f"{tally.hung_up} left in the middle, {len(tally.refused)} refused {sorted(set(tally.refused))}; "
        f"first token after {first[len(first) // 2]:.2f} s (median), {first[-1]:.2f} s (longest)"
    )
    print(f"asked again alone: {len(sample) - len(changed)} of {len(sample)} the same; still held: {left}")
    return int(bool(changed or any(left.values())))


if __name__ == "__main__":
    sys.exit(main())
