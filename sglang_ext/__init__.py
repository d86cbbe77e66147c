"""sglang-ext: speculative decoding and sparse attention for SGLang 0.5.23 on any device."""

__version__ = "0.1.0"
