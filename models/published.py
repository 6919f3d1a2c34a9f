"""The families of published checkpoints: which one a ``config.json`` is of, and which one can hold a config of ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.gemma import GEMMA, GEMMA2
from jaxpp.models.gemma3 import GEMMA3, TEXT_DEFAULTS
from jaxpp.models.gpt2 import GPT2
from jaxpp.models.gpt_neox import GPT_NEOX
from jaxpp.models.llama import LLAMA, SMOLLM3
from jaxpp.models.mistral import MISTRAL, MIXTRAL
from jaxpp.models.olmo import OLMO2
from jaxpp.models.phi import PHI3
from jaxpp.models.qwen import QWEN2, QWEN3
from jaxpp.models.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jaxpp.names import unknown

PUBLISHED: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "smollm3": SMOLLM3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "phi3": PHI3,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "olmo2": OLMO2,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
}
"""By ``model_type``."""


def text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the attributes of the language model: those of ``text_config`` in a multimodal Gemma-3, else all."""
    text = values.get("text_config")
    if values.get("model_type") != "gemma3" or not isinstance(text, Mapping):
        return values
    tie = {name: value for name, value in values.items() if name == "tie_word_embeddings"}
    return {**TEXT_DEFAULTS, **tie, **text, "model_type": "gemma3_text"}


def family_of(values: Mapping[str, Any], source: str = "config.json") -> Family:
    """Return the family of a parsed ``config.json``.

    Raises:
        ValueError: no ``model_type``, or one that is not `PUBLISHED`.
    """
    model_type = text_part(values).get("model_type")
    if model_type is None:
        raise ValueError(f'{source} has no "model_type"; known: {" ".join(PUBLISHED)}')
    if not isinstance(model_type, str) or model_type not in PUBLISHED:
        raise ValueError(unknown(f"{source}: unknown model_type", str(model_type), PUBLISHED))
    return PUBLISHED[model_type]


def read_config(
    values: Mapping[str, Any], accept: Collection[str] = (), source: str = "config.json"
) -> tuple[Family, DecoderConfig]:
    """Read a parsed ``config.json`` of any family, in either spelling.

    Args:
        values: the parsed file.
        accept: attributes that the user has accepted unread.
        source: its name, for messages.

    Raises:
        ValueError: an unknown family, quantised weights, or attributes that are missing, wrong or unknown.
    """
    family = family_of(values, source)
    quantised = values.get("quantization_config")
    if quantised and "quantization_config" not in accept:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        raise ValueError(
            f"{source}: the weights are quantised (quantization_config, method {method}), which is not read; give the "
            "checkpoint they were made from, or dequantise and save it first"
        )
    return family, family.read(Attributes(text_part(values), source, accept))


def family_for(config: DecoderConfig, preferred: str = "") -> Family:
    """Return the first family that can hold a config.

    Args:
        config: of a decoder.
        preferred: ``model_type`` to try first, such as that of the checkpoint it came from.

    Raises:
        ValueError: `preferred` is unknown, or no family holds it; says what llama would lose.
    """
    if preferred and preferred not in PUBLISHED:
        raise ValueError(unknown("unknown model_type", preferred, PUBLISHED))
    first = [PUBLISHED[preferred]] if preferred else []
    for family in [*first, *PUBLISHED.values()]:
        if _holds(family, config):
            return family
    try:
        LLAMA.write(config)
    except ValueError as error:
        raise ValueError(f"no published family holds this config; {error}") from None
    raise AssertionError("llama holds it after all")


def _holds(family: Family, config: DecoderConfig) -> bool:
    try:
        family.write(config)
    except ValueError:
        return False
    return True
