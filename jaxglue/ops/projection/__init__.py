"""Projections of one input: products with weights in any format, and their adapters."""
