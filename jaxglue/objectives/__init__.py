"""Objectives beyond supervised training: losses of answers' log-probabilities, and their configuration."""
