"""Answer prompts: the same as `jaxglue generate`."""

from jaxglue.commands import run

if __name__ == "__main__":
    run("generate")
