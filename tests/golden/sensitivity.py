"""How far each mistake of a reader moves the logits: what the tolerance of the tests must stay below.

Most mistakes are a changed configuration with the same weights; the others are changed weights that stand for a wrong
layout. The largest change over the stored batches (the long one too) is printed. Needs torch.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import reading, reference

Weights = dict[str, np.ndarray]
TOLERANCE = 1e-4
SAME = ("config_v4", "config early", "fused experts")  # no mistakes: other spellings of the same model
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
# "gelu_python" is exact; 5.x reads "gelu" of Gemma 1 as the tanh form.
ACTIVATIONS = {"gelu": "gelu_new", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu_python"}


def report(names: list[str]) -> None:
    """Print one line for each case and mistake, then the range of each mistake over the cases.

    Raises:
        ValueError: Another spelling of the same model moved the logits.
    """
    table: dict[str, dict[str, float]] = {}
    for name in names:
        for mistake, change in changes(name):
            table.setdefault(mistake, {})[name] = change
            print(f"{name:16} {mistake:28} {change:.1e}", flush=True)
            if mistake in SAME and change > TOLERANCE:
                raise ValueError(f"{name}: {mistake} is no mistake, but moves the logits by {change:.1e}")
    print(f"\n{'mistake':28} {'least':8} {'most':8} cases   (below {TOLERANCE:.0e}: named)")
    for mistake, row in table.items():
        hidden = [name for name, change in row.items() if change < TOLERANCE] if mistake not in SAME else []
        print(f"{mistake:28} {min(row.values()):<8.1e} {max(row.values()):<8.1e} {len(row):2}   {' '.join(hidden)}")


def changes(name: str) -> Iterator[tuple[str, float]]:
    """Yield each mistake that this case can show and the largest change of a logit."""
    golden, drawn = reading.load(name), reading.weights(name)
    yield "config_v4", _change(golden, golden.config_v4, drawn)
    yield "config early", _change(golden, reading.early(golden.config_v4), drawn)
    if name in reading.fused_cases():
        yield "fused experts", _change(golden, golden.config, reading.weights(name, fused=True))
    for mistake, config in wrong_configs(golden.config):
        yield mistake, _change(golden, config, drawn)
    for mistake, wrong in wrong_weights(golden.config, drawn):
        yield mistake, _change(golden, golden.config, wrong)


def wrong_configs(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield configurations with one value misread."""
    for key in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"):
        if key in config:
            yield "eps x10", {**config, key: config[key] * 10}
    activation = {key: ACTIVATIONS[config[key]] for key in ACTIVATION_KEYS if config.get(key) in ACTIVATIONS}
    if activation:
        yield "gelu tanh <-> exact", {**config, **activation}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            yield f"no {key.partition('_')[0]} soft cap", {**config, key: None}
    if (window := config.get("sliding_window")) and "sliding" in str(config.get("layer_types", "sliding")):
        full = ["full_attention"] * config["num_hidden_layers"]
        layers = {"layer_types": full} if "layer_types" in config else {"sliding_window": None}
        yield "window ignored", {**config, **layers}
        yield "window off by one", {**config, "sliding_window": window + 1}
    if "sliding_attention" in (types := config.get("layer_types", [])):
        yield "local/global swapped", {**config, "layer_types": [_swapped(kind) for kind in types]}
    if "query_pre_attn_scalar" in config:
        yield "query scale from head_dim", {**config, "query_pre_attn_scalar": config["head_dim"]}
    if "norm_topk_prob" in config:
        yield "norm_topk_prob flipped", {**config, "norm_topk_prob": not config["norm_topk_prob"]}
    if "use_parallel_residual" in config:
        yield "parallel residual flipped", {**config, "use_parallel_residual": not config["use_parallel_residual"]}
    if "no_rope_layers" in config:
        yield "rope in every layer", {**config, "no_rope_layers": [1] * config["num_hidden_layers"]}
    yield from _wrong_ropes(config)


def wrong_weights(config: Mapping[str, Any], drawn: Weights) -> Iterator[tuple[str, Weights]]:
    """Yield weights with one layout misread."""
    edits: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
        "biases dropped": (r"(?<!norm)\.bias$", np.zeros_like),
        "qk-norm weights ignored": (r"[qk]_norm\.weight$", np.ones_like),
        "rope half <-> interleaved": (r"[qk]_proj\.(weight|bias)$", lambda value: _interleaved(config, value)),
        "square o_proj transposed": (r"self_attn\.o_proj\.weight$|attn\.c_proj\.weight$", _transposed),
        "gate/up halves swapped": (r"gate_up_proj\.weight$", lambda value: np.concatenate(np.split(value, 2)[::-1])),
        "qkv as three blocks": (r"query_key_value", lambda value: _blocks(config, value)),
    }
    if config["model_type"].startswith("gemma"):
        edits["norm +1 forgotten"] = (r"norm\.weight$", lambda value: value - 1)
        edits["qk-norm weights ignored"] = (r"[qk]_norm\.weight$", np.zeros_like)
    for mistake, (pattern, edit) in edits.items():
        wrong = {key: edit(value) if re.search(pattern, key) else value for key, value in drawn.items()}
        if any(not np.array_equal(wrong[key], drawn[key]) for key in drawn):
            yield mistake, wrong
    swapped = {_other(key): value for key, value in drawn.items()}
    if list(swapped) != list(drawn):
        yield "gate/up swapped", swapped


def _wrong_ropes(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    rope = config.get("rope_parameters")
    if not rope:
        return
    if "full_attention" in rope:
        whole, local = rope["full_attention"], rope["sliding_attention"]
        yield "rope scaling ignored", _with_rope(config, full_attention=_unscaled(whole), sliding_attention=local)
        yield (
            "rope scaling on local too",
            _with_rope(config, full_attention=whole, sliding_attention={**whole, "rope_theta": local["rope_theta"]}),
        )
        yield (
            "one theta for both",
            _with_rope(config, full_attention=whole, sliding_attention={**local, "rope_theta": whole["rope_theta"]}),
        )
        return
    yield "theta other than in file", _with_rope(config, **{**rope, "rope_theta": _other_theta(rope["rope_theta"])})
    if rope["rope_type"] != "default":
        yield "rope scaling ignored", _with_rope(config, **_unscaled(rope))
    if rope["rope_type"] in ("yarn", "longrope"):
        yield "attention factor ignored", _with_rope(config, **rope, attention_factor=1.0)
    if rope["rope_type"] == "llama3":
        yield "llama3 factor 8 <-> 32", _with_rope(config, **{**rope, "factor": 40.0 - rope["factor"]})
    if rope["rope_type"] == "longrope":
        short, long = rope["short_factor"], rope["long_factor"]
        yield "short table only", _with_rope(config, **{**rope, "long_factor": short})
        yield "long table only", _with_rope(config, **{**rope, "short_factor": long})
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial rotary ignored", _with_rope(config, **{**rope, "partial_rotary_factor": 1.0})


def _with_rope(config: Mapping[str, Any], **rope: Any) -> dict[str, Any]:
    return {**config, "rope_parameters": rope}


def _unscaled(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("rope_theta", "partial_rotary_factor")
    return {"rope_type": "default", **{key: rope[key] for key in kept if key in rope}}


def _other_theta(theta: float) -> float:
    return 10000.0 if theta != 10000.0 else 500000.0


def _swapped(kind: str) -> str:
    return "full_attention" if kind == "sliding_attention" else "sliding_attention"


def _interleaved(config: Mapping[str, Any], value: np.ndarray) -> np.ndarray:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = value.reshape(-1, head_dim // 2, 2, *value.shape[1:])
    return heads.swapaxes(1, 2).reshape(value.shape)


def _transposed(value: np.ndarray) -> np.ndarray:
    return value.T if value.shape[0] == value.shape[1] else value


def _blocks(config: Mapping[str, Any], value: np.ndarray) -> np.ndarray:
    """Order the rows such that a reader by heads sees what a reader by three blocks would."""
    heads = value.reshape(3, config["num_attention_heads"], -1, *value.shape[1:])
    return heads.swapaxes(0, 1).reshape(value.shape)


def _other(name: str) -> str:
    names = {".gate_proj": ".up_proj", ".up_proj": ".gate_proj", ".w1.": ".w3.", ".w3.": ".w1."}
    return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], name)


def _change(golden: reading.Golden, config: Mapping[str, Any], tensors: Weights) -> float:
    with tempfile.TemporaryDirectory() as temporary:
        model, problems = reference.open_model(reading.write_directory(Path(temporary), config, tensors))
    if problems:
        raise ValueError(f"{golden.name}: {'; '.join(problems)}")
    kinds = [kind for kind in ("", "long_") if f"{kind}tokens" in golden.arrays]
    new = {kind: reference.logits(model, golden.arrays[f"{kind}tokens"]) for kind in kinds}
    return max(float(np.abs(new[kind] - golden.arrays[f"{kind}logits"]).max()) for kind in kinds)
