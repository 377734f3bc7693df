"""Gated feed-forwards between adapters."""
