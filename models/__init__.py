"""Model families: one file each, registered by one line of `FAMILIES`."""

if __name__ == "models":
    raise ImportError("write: from jaxpp.models import ... (a bare `import models` would define every class twice)")

from jaxpp.models.decoder import SIZES, Decoder, DecoderConfig

FAMILIES = {"decoder": (DecoderConfig, SIZES)}

__all__ = ["FAMILIES", "SIZES", "Decoder", "DecoderConfig"]
