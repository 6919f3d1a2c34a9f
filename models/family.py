"""What a family of published checkpoints is: how its config and its tensors translate, both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.convert.part import Part
from jaxpp.models.canonical import canonical, difference
from jaxpp.models.decoder_config import DecoderConfig

Tensors = Mapping[str, tuple[Part, ...]]
"""Path of a weight (``"blocks/attention/query/kernel"``) to where it lies; the first form is the one written."""


@dataclass(frozen=True)
class Family:
    """One family of checkpoints on the Hugging Face Hub.

    Args:
        model_type: its name in ``config.json``.
        architecture: the class that transformers loads it with.
        parse: attributes to our config. It takes every attribute that it understands; what is left is refused.
        spell: our config to attributes, in both spellings (transformers 4 and 5), whether or not they hold all of it.
        tensors: for a config, where each weight lies. Every weight of the decoder has an entry. A tied config has none
            for the head; the untied one tells where a file would keep it.
        renames: regular expression and replacement, applied in order with ``re.sub`` to the names in a file before
            they are looked up (prefixes).
        ignored: regular expressions, searched in renamed names: tensors that may be there and are not read (buffers).
        presets: config values of well-known sizes.
    """

    model_type: str
    architecture: str
    parse: Callable[[Attributes], DecoderConfig]
    spell: Callable[[DecoderConfig], dict[str, Any]]
    tensors: Callable[[DecoderConfig], Tensors]
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def read(self, attributes: Attributes) -> DecoderConfig:
        """Return our config in its canonical form.

        Raises:
            ValueError: an attribute is missing, or asks for maths that we do not compute; or one that nobody knows.
        """
        config = canonical(self.parse(attributes))
        attributes.check_all_read()
        return config

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the attributes of a config, complete but for the dtype, in both spellings at once.

        Raises:
            ValueError: they would read back as another model; lists what differs.
        """
        head = {"architectures": [self.architecture], "model_type": self.model_type}
        attributes = {**head, **self.spell(config)}
        try:
            lost = difference(config, self.read(Attributes(attributes)))
        except ValueError as error:
            raise ValueError(f"a {self.model_type} checkpoint cannot hold this config: {error}") from None
        if lost:
            raise ValueError(f"a {self.model_type} checkpoint cannot hold {'; '.join(lost)}")
        return attributes
