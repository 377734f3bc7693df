"""Answers prompts with a model, with or without an adapter.

python scripts/generate.py --model models/Qwen3-0.6B --adapter runs/first/adapter --prompt "Why is the sky blue?"
"""

import sys

from jaxglue.chat import GenerateConfig, generate
from jaxglue.cli import parse_config


def main() -> int:
    config = parse_config(GenerateConfig)
    try:
        for prompt, answer in generate(config):
            if len(config.prompts) > 1:
                print(f"> {prompt}")
            for piece in answer:
                print(piece, end="", flush=True)
            print()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
