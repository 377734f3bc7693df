"""Answer prompts with a model and an optional adapter.

python scripts/generate.py --model models/Qwen3-0.6B --adapter runs/first/adapter --prompt "Why is the sky blue?"
"""

from jaxglue.cli import parse_config, user_errors
from jaxglue.generation.chat import GenerateConfig, generate


def main() -> None:
    config = parse_config(GenerateConfig)
    with user_errors():
        for prompt, answer in generate(config):
            if len(config.prompts) > 1:
                print(f"> {prompt}")
            for piece in answer:
                print(piece, end="", flush=True)
            print()


if __name__ == "__main__":
    main()
