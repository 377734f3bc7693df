"""Fine-tune a model: the same as `jaxglue train`."""

from jaxglue.commands import run

if __name__ == "__main__":
    run("train")
