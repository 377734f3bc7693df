"""The executor, which runs a model layer by layer, and what its layers keep."""
