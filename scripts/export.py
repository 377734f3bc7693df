"""Merge an adapter or quantize a model: the same as `jaxglue export`."""

from jaxglue.commands import run

if __name__ == "__main__":
    run("export")
