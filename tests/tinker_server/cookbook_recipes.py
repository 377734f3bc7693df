"""Run a recipe of tinker-cookbook as it is: data, tokenizer, sizes and the address of the server are given to it.

python cookbook_recipes.py RECIPE URL MODEL LOGS [STATE]
python cookbook_recipes.py tokenizer - MODEL -
"""

import asyncio
import logging
import random
import sys
import threading
from pathlib import Path
from typing import Any

import chz
import datasets
from tinker_cookbook import tokenizer_utils
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""Whose renderer the recipes choose; the server's model is in a folder of the name."""
WORDS = ("the", "count", "of", "words", "on", "a", "page", "could", "be", "many", "until", "then", "known")


def corpus() -> str:
    """Return pages of words in place of WikiText-103."""
    rng = random.Random(0)
    return "\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(2000))


def load_dataset(path: str, name: str | None = None, *, split: str | None = None) -> object:
    """Return local rows in place of a data set of the hub, or of one split of its."""
    found = rows_of(path)
    return found if split is None else found[split]


def rows_of(path: str) -> datasets.DatasetDict:
    """Return the splits of a data set."""
    if path == "HuggingFaceH4/no_robots":
        rows = [{"messages": (count if i % 2 else say)(i // 2)} for i in range(400)]
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
    if path == "openai/gsm8k":
        rows = [{"question": f"say {i % 2}", "answer": f"it is\n#### {i % 2}"} for i in range(64)]
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:4]))
    if path == "Salesforce/wikitext":
        rows = [{"text": line} for line in corpus().splitlines()]
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
    raise ValueError(path)


def pages() -> Any:
    """Return sizes of the task of `rl_numerics_check`."""
    from tinker_cookbook.recipes.rl_numerics_check.env import CountingTaskConfig

    return CountingTaskConfig(num_pages_min=1, num_pages_max=2, page_chars=60, words=("until",), reward_tolerance=2.0)


def say(number: int) -> list[dict[str, str]]:
    """Return a chat whose answer is a boxed number."""
    user, assistant = f"say {number % 2}", f"\\boxed{{{number % 2}}}"
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def count(number: int) -> list[dict[str, str]]:
    """Return a chat of `rl_numerics_check` in which a page is read, or a number of words told."""
    from tinker_cookbook.recipes.rl_numerics_check import env
    from tinker_cookbook.renderers import get_renderer

    problem = env.sample_problem(random.Random(number), corpus(), pages())
    renderer: Any = get_renderer("qwen3_instruct", tokenizer_utils.get_tokenizer(NAME))
    tools = [env.PageReader(problem.pages, env.EpisodeState()).read_page.to_spec()]
    call = '<tool_call>\n{"name": "read_page", "arguments": {"page": 1}}\n</tool_call>'
    answer = call if number % 2 else f"Answer: {number // 2 % 2}"
    user, assistant = {"role": "user", "content": problem.prompt}, {"role": "assistant", "content": answer}
    return [*renderer.create_conversation_prefix_with_tools(tools, env.SYSTEM_PROMPT), user, assistant]


def write_tokenizer(folder: str) -> None:
    """Write a tokenizer to which the texts of the recipes are few tokens."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=special, initial_alphabet=alphabet)
    texts = [*WORDS, *(message["content"] for i in range(40) for message in (*say(i), *count(i)))]
    found.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|im_end|>").save_pretrained(folder)


def sl_loop(url: str, logs: str, _: str | None) -> None:
    """Learn to say a boxed number, or to count words on pages."""
    from tinker_cookbook.recipes import sl_loop as recipe

    settings = {"max_steps": 16, "batch_size": 8, "learning_rate": 1e-2, "max_length": 256, "lora_rank": 8}
    recipe.main(recipe.Config(base_url=url, log_path=logs, model_name=NAME, save_every=8, **settings))


def rl_loop(url: str, logs: str, _: str | None) -> None:
    """Learn by rewards to say the right one."""
    from tinker_cookbook.recipes import rl_loop as recipe

    settings = {"max_steps": 3, "batch_size": 2, "group_size": 4, "max_tokens": 8, "lora_rank": 8, "save_every": 2}
    recipe.main(recipe.Config(base_url=url, log_path=logs, model_name=NAME, learning_rate=1e-3, **settings))


def rl_basic(url: str, logs: str, state: str | None) -> None:
    """Learn by rewards, through the cookbook's own trainer."""
    from tinker_cookbook import model_info
    from tinker_cookbook.recipes import rl_basic as recipe
    from tinker_cookbook.recipes.math_rl.math_env import Gsm8kDatasetBuilder
    from tinker_cookbook.rl import train

    names = {"model_name_for_tokenizer": NAME, "renderer_name": model_info.get_recommended_renderer_name(NAME)}
    sizes = {"max_steps": 2, "max_tokens": 12, "lora_rank": 8}
    builder = Gsm8kDatasetBuilder(batch_size=2, group_size=4, **names)
    blueprint = recipe.build_config_blueprint(NAME)
    local = {"base_url": url, "log_path": logs, "load_checkpoint_path": state}
    blueprint.apply({"dataset_builder": builder, **local, **sizes})
    asyncio.run(train.main(blueprint.make()))


def rl_numerics_check(url: str, logs: str, state: str | None) -> None:
    """Count words on pages that a tool reads."""
    from tinker_cookbook.recipes.rl_numerics_check import train as recipe
    from tinker_cookbook.rl import train

    sizes = {"group_size": 4, "groups_per_batch": 2, "max_tokens": 8, "max_trajectory_tokens": 500, "max_steps": 2}
    config = recipe.CLIConfig(base_url=url, log_path=logs, model_name=NAME, task=pages(), lora_rank=8, **sizes)
    asyncio.run(train.main(chz.replace(recipe.build_config(config), load_checkpoint_path=state)))


def main(recipe: str, url: str, model: str, logs: str, state: str | None = None) -> None:
    """Run a recipe of this file's, from a state that another has saved."""
    logging.basicConfig(level=logging.INFO)
    datasets.load_dataset = load_dataset  # type: ignore[assignment]
    tokenizer, lock = AutoTokenizer.from_pretrained(model), threading.Lock()
    encode = tokenizer.encode

    def encode_alone(*arguments: Any, **options: Any) -> list[int]:
        with lock:  # or threads of the recipes borrow the fast tokenizer at the same time
            return encode(*arguments, **options)

    tokenizer.encode = encode_alone
    tokenizer_utils.register_tokenizer(NAME, lambda: tokenizer)
    if recipe == "tokenizer":
        write_tokenizer(model)
        return
    Path(logs).mkdir(parents=True, exist_ok=True)
    globals()[recipe](url, logs, state)


if __name__ == "__main__":
    main(*sys.argv[1:])
