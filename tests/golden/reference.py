"""Run the reference: transformers on the CPU with eager attention and experts. Only where torch is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def open_model(folder: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, list[str]]:
    """Load a directory.

    Returns:
        The model and its problems: one line for each missing, unexpected or mis-shaped tensor.
    """
    plain: dict[str, Any] = {"attn_implementation": "eager", "ignore_mismatched_sizes": True}  # listed, not raised
    if not transformers.__version__.startswith("4."):
        plain["experts_implementation"] = "eager"
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **plain)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    problems = [f"{kind.removesuffix('_keys')}: {key}" for kind in kinds for key in sorted(map(str, info[kind]))]
    return model.eval(), problems


def logits(model: Any, tokens: np.ndarray, padding: np.ndarray | None = None) -> np.ndarray:
    """Run tokens [batch, seq] without a cache; positions count the tokens whose `padding` is 1.

    Returns:
        Logits [batch, seq, vocab] as float32 (float64 of a float64 model).
    """
    mask = torch.from_numpy(np.ones_like(tokens) if padding is None else padding).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ids = torch.from_numpy(tokens).long()
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return (out if out.dtype == torch.float64 else out.float()).numpy()


def greedy(model: Any, prompts: np.ndarray, num_new: int) -> tuple[np.ndarray, np.ndarray]:
    """Continue prompts [batch, seq], each step on the whole sequence.

    Returns:
        New tokens [batch, num_new], and how far the best logit led the second best at the closest step [batch].
    """
    tokens, lead = prompts, np.full(len(prompts), np.inf)
    for _ in range(num_new):
        last = logits(model, tokens)[:, -1]
        best = np.sort(last, axis=-1)[:, -2:]
        lead = np.minimum(lead, best[:, 1] - best[:, 0])
        tokens = np.concatenate([tokens, last.argmax(-1)[:, None].astype(tokens.dtype)], axis=1)
    return tokens[:, prompts.shape[1] :], lead
