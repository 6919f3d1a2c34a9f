"""Make the golden files of the model families: tiny random models and what transformers computes with them.

The test run needs neither torch nor transformers; this script does, in an environment of its own:

    python -m venv .venv/golden && .venv/golden/bin/pip install torch transformers==5.24.0 ml_dtypes
    .venv/golden/bin/python -m tests.golden.make [CASE...]       # everything but config_v4.json
    .venv/golden/bin/python -m tests.golden.make --sensitivity   # prints how far each mistake moves the logits

    python -m venv .venv/golden4 && .venv/golden4/bin/pip install torch transformers==4.57.6 ml_dtypes
    .venv/golden4/bin/python -m tests.golden.make [CASE...]      # config_v4.json, checked on the stored logits

Run it from the root of the repository, the first environment first. A new case is an entry of `RECIPES`. No weights
are stored: `reading.draw` draws them from seeds that hang on the names alone. Made with torch 2.13.0 on a CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from tests.golden import reading, reference
from tests.golden.recipes import RECIPES, Recipe

BATCH, SEQ, LONG, PROMPT, NUM_NEW = 2, 24, 48, 8, 16
REAL_TOKENS = (4, 9, 12)  # of the rows of the padded batch
CANDIDATES = 48  # prompts tried for the greedy continuation
MIN_LEAD = 0.02  # so that rounding never decides a greedy token
MAX_NOISE = 5e-5  # float32 against float64: well below the tolerance of the tests
LOGIT_DEVIATION = (1.2, 2.8)


def main() -> None:
    """Make the named cases, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--sensitivity", action="store_true", help="print how far each mistake moves the logits")
    arguments = parser.parse_args()
    names = arguments.cases or list(RECIPES)
    if arguments.sensitivity:
        from tests.golden import sensitivity

        sensitivity.report(names)
        return
    for name in names:
        (make_v4 if transformers.__version__.startswith("4.") else make)(name, RECIPES[name])


def make(name: str, recipe: Recipe) -> None:
    """Write everything but `config_v4.json`."""
    folder = reading.FAMILIES / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        saved = Path(temporary) / "saved"
        skeleton = AutoModelForCausalLM.from_config(configuration(recipe), dtype=torch.float32)
        skeleton.save_pretrained(saved)
        config = json.loads((saved / "config.json").read_text())
        tensors = {key: entry(recipe, key, shape) for key, shape in shapes(saved).items()}
        drawn = reading.draw(name, tensors)
        source = reading.write_directory(Path(temporary) / "source", config, drawn)
        model = strictly(source)
        _write_json(folder / "config.json", config)
        _write_tensors(folder / "tensors.json", tensors)
        _store_checksum(name, reading.checksum(drawn))
        if "num_experts_per_tok" in recipe.config:
            _write_tensors(folder / "tensors_fused.json", fused_entries(model, drawn, Path(temporary) / "fused"))
        arrays = compute(name, recipe, model)
        if recipe.bf16:
            half = reading.write_directory(Path(temporary) / "half", config, drawn, dtype="bfloat16")
            arrays["logits_bf16"] = reference.logits(strictly(half, torch.bfloat16), arrays["tokens"])
            arrays["logits_bf16_weights"] = reference.logits(strictly(half), arrays["tokens"])
        np.savez_compressed(folder / "golden.npz", allow_pickle=False, **arrays)
        noise = np.abs(reference.logits(model.double(), arrays["tokens"]) - arrays["logits"]).max()
    report(name, arrays, noise)


def make_v4(name: str, recipe: Recipe) -> None:
    """Write `config_v4.json`, and require that this release computes the stored logits from it."""
    config = configuration(recipe)
    config.architectures = json.loads((reading.FAMILIES / name / "config.json").read_text())["architectures"]
    with tempfile.TemporaryDirectory() as temporary:
        config.save_pretrained(temporary)
        written = json.loads((Path(temporary) / "config.json").read_text())
        # 4.56 and later already write `dtype`; nearly all published 4.x files hold `torch_dtype`.
        written.pop("dtype", None)
        written["torch_dtype"] = "float32"
        _write_json(reading.FAMILIES / name / "config_v4.json", written)
        model = strictly(reading.write(name, Path(temporary) / "source", spelling="v4"))
        arrays = reading.load(name).arrays
        difference = np.abs(reference.logits(model, arrays["tokens"]) - arrays["logits"]).max()
        if "long_tokens" in arrays:
            long = np.abs(reference.logits(model, arrays["long_tokens"]) - arrays["long_logits"]).max()
            difference = max(difference, long)
    print(f"{name:16} 4.x differs from the stored logits by {difference:.1e}", flush=True)
    if difference > MAX_NOISE:
        raise ValueError(f"{name}: 4.x differs by {difference:.1e}, more than {MAX_NOISE:.0e}")


def configuration(recipe: Recipe) -> Any:
    """Build the configuration object of whichever transformers is installed."""
    return AutoConfig.for_model(recipe.model_type, **recipe.config)


def shapes(folder: Path) -> dict[str, list[int]]:
    """Read the tensors' names and shapes from the header of a saved model."""
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys(), key=_natural)}


def entry(recipe: Recipe, name: str, shape: list[int]) -> dict[str, Any]:
    """Give shape, deviation and mean of a tensor, wide enough that every mistake shows in the logits."""
    mean, fan_in = 0.0, shape[0] if recipe.model_type == "gpt2" and len(shape) == 2 else shape[-1]
    if name.endswith(".bias"):
        deviation = 0.3
    elif "norm" in name or re.search(r"\.ln_", name):
        deviation, mean = 0.2, 0.0 if recipe.model_type.startswith("gemma") else 1.0
    elif re.search(r"embed_tokens|embed_in|wte|wpe", name):
        tied = recipe.config.get("tie_word_embeddings", True)
        deviation = 0.3 if "wpe" in name else 1.8 / shape[1] ** 0.5 if tied else 0.5
    elif re.search(r"lm_head|embed_out|\.gate\.|shared_expert_gate", name):
        deviation = 1.8 / fan_in**0.5
    elif re.search(r"down_proj|w2|mlp\.c_proj|4h_to_h", name):
        deviation = 2.0 / fan_in**0.5
    else:
        deviation = 1.4 / fan_in**0.5
    for part, gain in recipe.gains.items():
        deviation *= gain if part in name else 1.0
    return {"shape": shape, "deviation": round(deviation, 4), "mean": mean}


def strictly(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a directory whose every tensor must be used and none missing."""
    model, problems = reference.open_model(folder, dtype)
    if problems:
        raise ValueError(f"{folder}: {'; '.join(problems)}")
    return model


def compute(name: str, recipe: Recipe, model: Any) -> dict[str, np.ndarray]:
    """Run the reference on every batch of the case."""
    vocab = recipe.config["vocab_size"]
    tokens = _tokens(name, "tokens", (BATCH, SEQ), vocab)
    width = max(REAL_TOKENS)
    padding = np.array([[0] * (width - real) + [1] * real for real in REAL_TOKENS], np.int32)
    padded = _tokens(name, "padded", padding.shape, vocab) * padding
    padded_logits = reference.logits(model, padded, padding)[padding == 1]
    alone = [
        reference.logits(model, row[None, width - real :])[0] for row, real in zip(padded, REAL_TOKENS, strict=True)
    ]
    if (difference := np.abs(padded_logits - np.concatenate(alone)).max()) > MAX_NOISE:
        raise ValueError(f"{name}: padded rows differ from the rows alone by {difference:.1e}")
    prompt, new = _greedy(name, model, vocab)
    arrays = {
        "tokens": tokens,
        "logits": reference.logits(model, tokens),
        "padded_tokens": padded,
        "padding": padding,
        "padded_logits": padded_logits,
        "greedy_prompt": prompt,
        "greedy_new": new,
    }
    if recipe.long:
        arrays["long_tokens"] = _tokens(name, "long", (1, LONG), vocab)
        arrays["long_logits"] = reference.logits(model, arrays["long_tokens"])
    return arrays


def fused_entries(model: Any, plain: Mapping[str, np.ndarray], folder: Path) -> dict[str, dict[str, Any]]:
    """Save with fused experts and find out, by comparing, of which plain tensors each fused one consists."""
    model.save_pretrained(folder, save_original_format=False)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        saved = {key: file.get_tensor(key) for key in sorted(file.keys(), key=_natural)}
    entries = {}
    for name, value in saved.items():
        if value.ndim < 3:
            source = next(key for key, tensor in plain.items() if np.array_equal(tensor, value))
            entries[name] = {"shape": list(value.shape), "copy": source}
            continue
        stack = [_parts(expert, plain) for expert in value]
        entries[name] = {"shape": list(value.shape), "stack": stack}
    rebuilt = reading.fuse(plain, entries)
    if any(not np.array_equal(rebuilt[name], value) for name, value in saved.items()):
        raise ValueError("the fused tensors are no concatenation of the plain ones by rows")
    return entries


def report(name: str, arrays: Mapping[str, np.ndarray], noise: float) -> None:
    """Print one line; refuse a case whose logits are too narrow, too wide or too noisy."""
    deviation, new = arrays["logits"].std(), arrays["greedy_new"]
    size = sum(path.stat().st_size for path in (reading.FAMILIES / name).iterdir())
    print(
        f"{name:16} logit deviation {deviation:.2f}  float32 noise {noise:.1e}  "
        f"{len(set(new.tolist())):2} distinct greedy tokens  {size / 1024:.0f} KiB",
        flush=True,
    )
    if not LOGIT_DEVIATION[0] <= deviation <= LOGIT_DEVIATION[1]:
        raise ValueError(f"{name}: logit deviation {deviation:.2f} is outside {LOGIT_DEVIATION}")
    if noise > MAX_NOISE:
        raise ValueError(f"{name}: float32 noise {noise:.1e} is above {MAX_NOISE:.0e}")


def _parts(expert: np.ndarray, plain: Mapping[str, np.ndarray]) -> list[str]:
    parts = []
    while len(expert):
        candidates = (key for key, tensor in plain.items() if np.array_equal(tensor, expert[: len(tensor)]))
        parts.append(next(candidates))
        expert = expert[len(plain[parts[-1]]) :]
    return parts


def _tokens(name: str, what: str, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    return np.random.RandomState(reading.seed(name, what)).randint(8, vocab, shape).astype(np.int32)


def _greedy(name: str, model: Any, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Take the prompt with the most varied continuation, of those where no step is close and none ends the text."""
    prompts = _tokens(name, "greedy", (CANDIDATES, PROMPT), vocab)
    new, lead = reference.greedy(model, prompts, NUM_NEW)
    fit = (lead > MIN_LEAD) & (new.min(-1) >= 8)
    if not fit.any():
        raise ValueError(f"{name}: no greedy continuation leads by {MIN_LEAD} at every step")
    best = max(np.flatnonzero(fit), key=lambda row: len(set(new[row].tolist())))
    return prompts[best], new[best]


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _store_checksum(name: str, value: int) -> None:
    stored = json.loads(reading.CHECKSUMS.read_text()) if reading.CHECKSUMS.exists() else {}
    _write_json(reading.CHECKSUMS, stored | {name: value})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _write_tensors(path: Path, entries: Mapping[str, Any]) -> None:
    """Write one line for each tensor."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
