"""Predict time and memory of training: the same as `jaxglue estimate`."""

from jaxglue.commands import run

if __name__ == "__main__":
    run("estimate")
