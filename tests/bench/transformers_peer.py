"""transformers on torch, in an environment of its own: reads prompts in JSON, generates, writes ids and seconds."""

from __future__ import annotations

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Answer lines until there are no more."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["prompts"])
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked["new"], min_new_tokens=asked["new"],
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        seconds = time.perf_counter() - begin
        print(json.dumps({"ids": out[:, ids.shape[1] :].tolist(), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
