"""The small documents beside weights that are written: config, generation config, tokenizer, chat template."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax

from jaxpp import config as configs
from jaxpp.convert.attributes import HARMLESS
from jaxpp.data.published import KEPT_CONFIG, TEXTS, texts_of, tokenizer_of
from jaxpp.model import ModelConfig
from jaxpp.models import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.published import PUBLISHED, family_for, read_config
from jaxpp.train.config import Run, resolved
from jaxpp.train.session import OWN_TEXTS


def beside_published(texts: Mapping[str, str]) -> dict[str, str]:
    """Return what transformers reads beside config and weights; for a tokenizer that we trained, all it needs."""
    held = {name: texts[name] for name in TEXTS if name in texts}
    if "tokenizer.json" in held and "tokenizer_config.json" not in held:
        tokenizer = tokenizer_of(texts)
        return {**(texts_of(tokenizer) if tokenizer else {}), **held}
    return held


def beside_ours(config: ModelConfig, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the documents of a checkpoint of ours: what travels with the weights, and the model's config."""
    carried = {name: text for name, text in texts.items() if name not in OWN_TEXTS}
    return {**carried, "config.yaml": configs.dump(resolved(Run(config)))}


def family_to_write(config: ModelConfig, texts: Mapping[str, str], wanted: str) -> Family:
    """Return the family to write as: the one wanted, else the one it came as, else the first that can hold the model.

    Raises:
        ValueError: the model is no decoder of ours, or no family holds it.
    """
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"a {type(config).__name__} is no decoder of ours, so no published family holds it")
    config = dataclasses.replace(config, vocab_rows=0)  # rows that stand for no token are not written
    kept = json.loads(texts[KEPT_CONFIG]).get("model_type", "") if KEPT_CONFIG in texts else ""
    found = family_for(config, wanted or {"gemma3": "gemma3_text"}.get(kept, kept))
    if wanted and found.model_type != wanted:
        raise ValueError(f"a {wanted} checkpoint cannot hold this model; {found.model_type} can")
    return found


def attributes_to_write(
    config: DecoderConfig, texts: Mapping[str, str], model_type: str, params: Any
) -> dict[str, Any]:
    """Return the ``config.json`` to write: the original's where it still describes the model, else a new one.

    Args:
        config: of the model.
        texts: the documents that travel with the weights, among them the original (`KEPT_CONFIG`) if there was one.
        model_type: of the family to write as.
        params: the weights, for their dtype.
    """
    leaves = jax.tree.leaves(params)
    dtype = str(max({x.dtype for x in leaves}, key=lambda d: sum(x.size for x in leaves if x.dtype == d)))
    kept = json.loads(texts[KEPT_CONFIG]) if KEPT_CONFIG in texts else {}
    if kept.get("model_type") == model_type and _describes(kept, config):
        named = {name: dtype for name in ("dtype", "torch_dtype") if name in kept}
        return {"architectures": [PUBLISHED[model_type].architecture], **kept, **named}  # one from GGUF has none
    harmless = {name: kept[name] for name in kept if name in HARMLESS}
    attributes = family_for(config, model_type).write(config)
    # Named even where there is none: a family's own defaults may lie beyond a small vocabulary.
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {**special, **_ends(texts), **harmless, **attributes, "dtype": dtype, "torch_dtype": dtype}


def _describes(values: Mapping[str, Any], config: DecoderConfig) -> bool:
    try:
        return read_config(values)[1] == config
    except ValueError:  # attributes that were accepted unread
        return False


def _ends(texts: Mapping[str, str]) -> dict[str, Any]:
    named = json.loads(texts.get("generation_config.json", "{}"))
    return {name: named[name] for name in ("eos_token_id", "bos_token_id") if name in named}
