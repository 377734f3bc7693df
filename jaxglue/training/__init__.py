"""The trainer: configuration, optimizer, loop, checkpoints and metrics."""
