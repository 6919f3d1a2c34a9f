"""Using trained weights: sampling today; the partitioner, the engine and the server come here."""

from jaxpp.serve.generate import generate

__all__ = ["generate"]
