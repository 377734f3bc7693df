"""Run a recipe of tinker-cookbook as it is: data, tokenizer, sizes and the address of the server are given to it.

python cookbook_recipes.py RECIPE URL MODEL LOGS
"""

import asyncio
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import datasets
from tinker_cookbook import tokenizer_utils
from transformers import AutoTokenizer

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""Whose renderer the recipes choose; the server's model is in a folder of the name."""
WORDS = ("the", "count", "of", "words", "on", "a", "page", "could", "be", "many", "until", "then", "known")


def corpus() -> str:
    """Return pages of words in place of WikiText-103."""
    import random

    rng = random.Random(0)
    return "\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(2000))


def load_dataset(name: str, *_: object, **__: object) -> object:
    """Return local rows in place of a data set of the hub."""
    if name == "HuggingFaceH4/no_robots":
        turns = [[("user", f"say {i % 2}"), ("assistant", f"\\boxed{{{i % 2}}}")] for i in range(400)]
        rows = [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns]
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
    if name == "openai/gsm8k":
        rows = [{"question": f"say {i % 2}", "answer": f"it is\n#### {i % 2}"} for i in range(64)]
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:4]))
    if name == "Salesforce/wikitext":
        return datasets.Dataset.from_list([{"text": line} for line in corpus().splitlines()])
    raise ValueError(name)


def sl_loop(url: str, logs: str) -> None:
    """Learn to say a boxed number."""
    from tinker_cookbook.recipes import sl_loop as recipe

    settings = {"max_steps": 12, "batch_size": 8, "learning_rate": 1e-2, "max_length": 128, "lora_rank": 8}
    recipe.main(recipe.Config(base_url=url, log_path=logs, model_name=NAME, save_every=5, **settings))


def rl_loop(url: str, logs: str) -> None:
    """Learn by rewards to say the right one."""
    from tinker_cookbook.recipes import rl_loop as recipe

    settings = {"max_steps": 3, "batch_size": 2, "group_size": 4, "max_tokens": 8, "lora_rank": 8, "save_every": 2}
    recipe.main(recipe.Config(base_url=url, log_path=logs, model_name=NAME, learning_rate=1e-3, **settings))


def rl_basic(url: str, logs: str) -> None:
    """Learn by rewards, through the cookbook's own trainer."""
    from tinker_cookbook import model_info
    from tinker_cookbook.recipes import rl_basic as recipe
    from tinker_cookbook.recipes.math_rl.math_env import Gsm8kDatasetBuilder
    from tinker_cookbook.rl import train

    names = {"model_name_for_tokenizer": NAME, "renderer_name": model_info.get_recommended_renderer_name(NAME)}
    sizes = {"max_steps": 2, "max_tokens": 8, "lora_rank": 8}
    builder = Gsm8kDatasetBuilder(batch_size=2, group_size=2, **names)
    blueprint = recipe.build_config_blueprint(NAME)
    blueprint.apply({"dataset_builder": builder, "base_url": url, "log_path": logs, **sizes})
    asyncio.run(train.main(blueprint.make()))


def rl_numerics_check(url: str, logs: str) -> None:
    """Count words on pages that a tool reads."""
    from tinker_cookbook.recipes.rl_numerics_check import train as recipe
    from tinker_cookbook.recipes.rl_numerics_check.env import CountingTaskConfig
    from tinker_cookbook.rl import train

    task = CountingTaskConfig(num_pages_min=1, num_pages_max=2, page_chars=60, words=("until",))
    sizes = {"group_size": 2, "groups_per_batch": 2, "max_tokens": 8, "max_trajectory_tokens": 1500, "max_steps": 2}
    config = recipe.CLIConfig(base_url=url, log_path=logs, model_name=NAME, task=task, lora_rank=8, **sizes)
    asyncio.run(train.main(recipe.build_config(config)))


def main(recipe: str, url: str, model: str, logs: str) -> None:
    """Run a recipe of this file's."""
    logging.basicConfig(level=logging.INFO)
    datasets.load_dataset = load_dataset  # type: ignore[assignment]
    tokenizer, lock = AutoTokenizer.from_pretrained(model), threading.Lock()
    encode = tokenizer.encode

    def encode_alone(*arguments: Any, **options: Any) -> list[int]:
        with lock:  # or threads of the recipes borrow the fast tokenizer at the same time
            return encode(*arguments, **options)

    tokenizer.encode = encode_alone
    tokenizer_utils.register_tokenizer(NAME, lambda: tokenizer)
    Path(logs).mkdir(parents=True, exist_ok=True)
    globals()[recipe](url, logs)


if __name__ == "__main__":
    main(*sys.argv[1:])
