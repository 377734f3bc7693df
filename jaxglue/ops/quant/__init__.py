"""Quantized weights: storage formats and what expands them."""
