"""Model families: one file each, registered by one line of `FAMILIES`."""

if __name__ == "models":
    raise ImportError("write: from jaxpp.models import ... (a bare `import models` would define every class twice)")

from jaxpp.models.decoder import SIZES, Decoder, DecoderConfig
from jaxpp.models.published import PUBLISHED

FAMILIES = {
    "decoder": (DecoderConfig, SIZES),
    **{name: (DecoderConfig, family.presets) for name, family in PUBLISHED.items()},
}
"""Name of a family in a run's section ``model`` to its config and its presets."""

__all__ = ["FAMILIES", "PUBLISHED", "SIZES", "Decoder", "DecoderConfig"]
