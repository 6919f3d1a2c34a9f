"""Smaller weights: quantised to int8 or int4, for inference."""

from jaxpp.compress.quantization import KINDS, Quantization, quantize, refuse_quantized
from jaxpp.compress.quantized import Quantized, QuantizedWeight

__all__ = ["KINDS", "Quantization", "Quantized", "QuantizedWeight", "quantize", "refuse_quantized"]
