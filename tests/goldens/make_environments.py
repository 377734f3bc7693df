"""Make the goldens of episodes: TRL's tokens, masks, rewards and advantages of forced turns with environments.

Run with torch, transformers and trl installed (made with torch 2.13, transformers 5.24 and trl 1.16):

    python tests/goldens/make_environments.py

The tokenizer is the quickstart's with `TEMPLATE`; TRL's own trainer computes everything but the turns' tokens, which
are given. `environments.json`: for each case the environment, functions beside it, settings, rows, turns of each
episode (two of a row), and TRL's digests of prompts, tokens of completions, masks of tools, rewards and advantages.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import environments  # noqa: E402

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"


def call(name: str, **arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


TURNS = [
    [call("add", number=3), "it is 3"],
    [call("add", number=5) + call("add", number=4), call("divide", number=0), "no"],
    ["I do not count", "never said"],
    [call("unknown", number=1), call("add", number=2), call("add", wrong=2), "2"],
]
MOVES = [
    [call("move", direction="left"), call("move", direction="left"), "done"],
    [call("move", direction="up"), call("move", direction="right"), "done"],
    [call("move", direction="right"), call("move", direction="left"), call("move", direction="left"), "so"],
    ["left"],
]
GOALS = [{"prompt": asked("Count."), "goal": goal} for goal in (7, -1)]
CASES = {
    "tally": ("Tally", (), {}, GOALS, TURNS),
    "tally, few turns": ("Tally", (), {"max_tool_calling_iterations": 1}, GOALS, TURNS),
    "tally, short": ("Tally", (), {"max_completion_length": 100, "loss_type": "grpo"}, GOALS, TURNS),
    "slide": ("Slide", (), {}, [{"prompt": asked("Play."), "seed": seed} for seed in (1, 2)], MOVES),
    "both": (
        "BOTH",
        ("heard",),
        {},
        [
            {"prompt": asked("Count."), "goal": 5, "environment": "tally"},
            {"prompt": asked("Talk."), "goal": 0, "environment": "parrot"},
        ],
        [*TURNS[:2], [call("say", text="a"), call("say", text="b"), "a b"], [call("add", number=1), "nothing"]],
    ),
}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(HERE.parents[1] / "jaxglue/recipes/quickstart/model")
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=8, **sizes)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    goldens = {}
    for name, (environment, functions, settings, rows, turns) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            goldens[name] = forced(tokenizer, model, folder, environment, functions, settings, rows, turns)
    (HERE / "environments.json").write_text(json.dumps({"template": TEMPLATE, "cases": goldens}) + "\n")


def digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def forced(tokenizer, model, folder, environment, functions, settings, rows, turns) -> dict:
    options = {
        "max_completion_length": 400,
        "num_generations": 2,
        "per_device_train_batch_size": len(turns),
        **settings,
    }
    arguments = GRPOConfig(output_dir=folder, report_to=[], use_cpu=True, bf16=False, **options)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[getattr(environments, function) for function in functions],
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=getattr(environments, environment),
    )
    said, texts, places = [], {}, [0] * len(turns)

    def write(prompts, *others, **options):
        written = []
        for prompt in prompts:
            if len(said) < len(turns):
                episode = len(said)
                said.append(None)
            else:
                episode = next(i for i, text in texts.items() if prompt[: len(text)] == text)
            ids = tokenizer.encode(turns[episode][places[episode]] + END, add_special_tokens=False)
            ids = ids[: options.get("limit", 400)]
            places[episode] += 1
            texts[episode] = prompt + ids
            written.append(ids[: arguments.max_completion_length])
        return written, None

    trainer._generate_single_turn = write
    judge, seen = trainer._calculate_rewards, []

    def judged(*values):
        seen.append(judge(*values))
        return seen[-1]

    trainer._calculate_rewards = judged
    trainer.model.train()
    inputs = [row for row in rows for _ in range(2)]
    out = trainer._generate_and_score_completions(inputs)

    def listed(name, mask):
        return [row[keep.bool()].tolist() for row, keep in zip(out[name], out[mask], strict=True)]

    masks = out.get("tool_mask", torch.ones_like(out["completion_ids"]))
    kept = out["completion_mask"].bool()
    rewards = [[None if value != value else round(value, 6) for value in row] for row in seen[0].tolist()]
    return {
        **{"environment": environment, "functions": functions, "settings": settings, "rows": rows, "turns": turns},
        "names": trainer.reward_func_names,
        "prompts": [digest(ids) for ids in listed("prompt_ids", "prompt_mask")],
        "completions": listed("completion_ids", "completion_mask"),
        "masks": [mask[keep].tolist() for mask, keep in zip(masks, kept, strict=True)],
        "rewards": rewards,
        "advantages": out["advantages"].tolist(),
    }


if __name__ == "__main__":
    main()
