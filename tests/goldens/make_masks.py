"""Make the goldens of the loss masks: TRL's labels of rows of every kind, and axolotl's by its documented rules.

Run with torch, transformers and trl installed (made with torch 2.13, transformers 5.17 and trl 1.16), after
`make_models.py`:

    python tests/goldens/make_masks.py

The tokenizer is the quickstart's. `masks.json`:
    template                  chat template with {% generation %} markers
    trl.<name>                format, rows; of each row its tokens and the ranges [first, last) with labels
    axolotl                   the same for messages with `train` or `weight`, from axolotl's documented rules of type
                              chat_template, roles_to_train: [assistant], train_on_eos: turn; axolotl is not run
"""

import json
import tempfile
from itertools import groupby
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

HERE = Path(__file__).parent
TOKENIZER = HERE.parents[1] / "jaxglue" / "recipes" / "quickstart" / "model"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def turns(*contents: str, system: str = "") -> list[dict]:
    """Return a conversation of user and assistant in turns."""
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


CHATS = [
    turns("What is 2 plus 3?", "It is 5."),
    turns("Hi", "Hello!", "Grüße? ✓ 数", "  spaces and\nlines  ", system="Be brief."),
    turns("A", "", "B", "b"),
    [*turns("Look it up."), {"role": "tool", "content": "42"}, {"role": "assistant", "content": "42"}],
    turns("The answer ends the same", "The answer ends the same", "assistant\n", "user\n"),
]
ROWS = {
    "messages": ("messages", {"assistant_only_loss": True}, [{"messages": chat} for chat in CHATS]),
    "whole messages": ("messages", {}, [{"messages": chat} for chat in CHATS]),
    "completion of messages": (
        "prompt_completion",
        {"completion_only_loss": True},
        [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS],
    ),
    "completion": (
        "prompt_completion",
        {"completion_only_loss": True},
        [{"prompt": "Q: 2 + 3?\nA:", "completion": " 5"}, {"prompt": "Grüße", "completion": "\nto you\n\nall ✓"}],
    ),
    "text": ("text", {}, [{"text": "One and one is two."}, {"text": " 数 \n\n"}]),
}
AXOLOTL = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No", "train": False},
                  {"role": "user", "content": "Again"}, {"role": "assistant", "content": "Yes", "train": True}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Twice", "weight": 0},
                  {"role": "user", "content": "Twice"}, {"role": "assistant", "content": "Twice", "weight": 1}]},
    {"messages": CHATS[1]},
]  # fmt: skip


def ranges(mask: list[int]) -> list[list[int]]:
    places = [[index for index, _ in run] for on, run in groupby(enumerate(mask), lambda pair: pair[1]) if on]
    return [[run[0], run[-1] + 1] for run in places]


def trl_masks(tokenizer, options: dict, rows: list[dict]) -> list[dict]:
    model = AutoModelForCausalLM.from_pretrained(HERE / "qwen3_tied")
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(folder, max_length=None, report_to=[], use_cpu=True, bf16=False, **options)
        trainer = SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    columns = trainer.train_dataset.column_names
    label = "labels" if "labels" in columns else "input_ids"
    return [
        {"tokens": row["input_ids"], "trained": ranges([int(value != -100) for value in row[label]])}
        for row in trainer.train_dataset
    ]


def axolotl_mask(tokenizer, messages: list[dict]) -> dict:
    """Label the content of each trained assistant turn, and the end-of-turn token behind it."""
    text, spans = "", []
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        end = len(text) + len(message["content"]) + len("<|im_end|>")
        if message["role"] == "assistant" and message.get("train", message.get("weight", 1)):
            spans.append((len(text), end))
        text += f"{message['content']}<|im_end|>\n"
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    mask = [any(a <= start and end <= b for a, b in spans) for start, end in encoded["offset_mapping"]]
    return {"tokens": encoded["input_ids"], "trained": ranges(mask)}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    trl = {
        name: {"format": form, "rows": rows, "masks": trl_masks(tokenizer, options, rows)}
        for name, (form, options, rows) in ROWS.items()
    }
    axolotl = {"rows": AXOLOTL, "masks": [axolotl_mask(tokenizer, row["messages"]) for row in AXOLOTL]}
    content = {"template": TEMPLATE, "trl": trl, "axolotl": axolotl}
    (HERE / "masks.json").write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
