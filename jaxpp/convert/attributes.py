"""The attributes of a ``config.json``, with a record of what was read: what nobody understood is refused.

Both spellings are known, that of transformers 4 (``rope_theta`` at the top, ``torch_dtype``) and that of 5
(``rope_parameters``, ``dtype``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_REQUIRED: Any = object()
_NEEDED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}

HARMLESS = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache",
    "initializer_range", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "attention_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop",
    "classifier_dropout", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits",
    "pretraining_tp", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
    "cache_implementation", "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type",
    "task_specific_params", "is_encoder_decoder", "is_decoder", "use_return_dict", "finetuning_task",
    "gradient_checkpointing", "unsloth_fixed", "unsloth_version", "torchscript", "tokenizer_class", "prefix",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "typical_p",
    "bad_words_ids",
    "router_aux_loss_coef", "router_jitter_noise",  # of the loss, and noise while training
    "is_llama_config", "transformers.js_config", "n_ctx", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob",
    "output_past", "n_special", "predict_special_tokens", "max_length", "min_length", "do_sample", "temperature",
    "top_k", "top_p", "repetition_penalty", "num_beams",
    "reorder_and_upcast_attn",  # the order of a product; ours is in fp32 anyway
})  # fmt: skip
"""Attributes that do not change the logits of a forward pass."""


class Attributes:
    """The attributes of one ``config.json``, taken one by one.

    Args:
        values: the parsed file.
        source: its name, for messages.
        accept: attributes that the user has accepted unread.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json", accept: Collection[str] = ()):
        """Begin with nothing read."""
        self.values, self.source, self.accept = values, source, frozenset(accept)
        self._read: set[str] = set()

    def take(
        self, *names: str, kind: type | None = None, at_least: float | None = None, default: Any = _REQUIRED
    ) -> Any:
        """Return the first of `names` that is there and not null; all of them count as read.

        Args:
            names: the attribute's names, in all spellings.
            kind: what its value must be: int, float, bool, str, list or dict; None: anything.
            at_least: the smallest number allowed.
            default: what an absent one stands for; needed if left out.

        Raises:
            ValueError: none is there and no default is given, two are there and differ, or a value of another kind or
                too small.
        """
        self._read.update(names)
        found = {name: self.values[name] for name in names if self.values.get(name) is not None}
        for name, value in found.items():
            self._check_kind(name, value, kind)
            if at_least is not None and value < at_least:
                raise ValueError(f"{self.source}: {name} = {value!r}; {at_least} or more is needed")
        if any(value != next(iter(found.values())) for value in found.values()):
            pairs = " and ".join(f"{name} {value!r}" for name, value in found.items())
            raise ValueError(f"{self.source} says {pairs}, which are two names of one thing; keep one")
        if found:
            value = next(iter(found.values()))
            return float(value) if kind is float else value
        if default is _REQUIRED:
            raise ValueError(f'{self.source} has no "{names[0]}", which a {self.values.get("model_type")} model needs')
        return default

    def take_or_null(self, name: str, *, kind: type | None = None, default: Any) -> Any:
        """Return the attribute, `default` if it is absent, and None if it is there and null."""
        value = self.take(name, kind=kind, default=None)
        return default if value is None and name not in self.values else value

    def _check_kind(self, name: str, value: Any, kind: type | None) -> None:
        if kind is None:
            return
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{self.source}: {name} = {value!r}; {_NEEDED[kind]} is needed")

    def must_be(self, name: str, *allowed: Any) -> None:
        """Refuse an attribute that would change the maths in a way that we do not compute; absent is fine.

        Raises:
            ValueError: its value is none of `allowed`.
        """
        value = self.take(name, default=None)
        if value is not None and value not in allowed:
            wanted = " or ".join(repr(one) for one in allowed)
            raise ValueError(f"{self.source}: {name} = {value!r} is not supported; {wanted} is")

    def check_all_read(self) -> None:
        """Refuse attributes that nobody read and that are not known to be harmless.

        Raises:
            ValueError: lists them.
        """
        known = self._read | HARMLESS | self.accept
        left = sorted(name for name, value in self.values.items() if name not in known and value is not None)
        if left:
            listed = ", ".join(f"{name} = {self.values[name]!r}" for name in left)
            raise ValueError(
                f"{self.source} has attributes that this reader does not know and that may change the maths: {listed}; "
                f"if you know that they do not, accept them with --accept={','.join(left)}"
            )
