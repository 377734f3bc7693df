"""Answer prompts: `jaxglue generate --model FOLDER --adapter runs/first/adapter --prompt "Why is the sky blue?"`."""

from collections.abc import Sequence

from jaxglue.cli import parse_config
from jaxglue.generation.chat import GenerateConfig, generate


def main(argv: Sequence[str] | None = None) -> None:
    """Print the prompts' answers piece by piece."""
    config = parse_config(GenerateConfig, argv, command="generate")
    for prompt, answer in generate(config):
        if len(config.prompts) > 1:
            print(f"> {prompt}")
        for piece in answer:
            print(piece, end="", flush=True)
        print()
