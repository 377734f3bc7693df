"""Time and memory of a training step, foreseen, and the choice of a policy."""
