"""Quantized weights: configs of checkpoints, quantized layers, and quantizing a model.

QuantizationConfig -> get_quant_method(layer, prefix) -> LinearMethod
                   -> get_experts_method(experts, prefix) -> ExpertsMethod
    create_weights, (load), process_weights_after_loading; scheme.apply
"""

from atomc.quantization.apply import quantize
from atomc.quantization.config import QuantizationConfig, decide, parse
from atomc.quantization.convert_quantized import adopt
from atomc.quantization.experts import ExpertsMethod, QuantizedExperts
from atomc.quantization.linear import LinearMethod, QuantizedLinear
from atomc.quantization.scheme import ONLINE

__all__ = [
    "ONLINE",
    "ExpertsMethod",
    "LinearMethod",
    "QuantizationConfig",
    "QuantizedExperts",
    "QuantizedLinear",
    "adopt",
    "decide",
    "parse",
    "quantize",
]
