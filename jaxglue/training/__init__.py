"""The trainer: configuration, optimiser, loop, checkpoints and metrics."""
