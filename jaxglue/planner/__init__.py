"""Prediction of a training step's time and memory, and the choice of a remat policy."""
