"""Write the quickstart's chats, pairs and small model's tokenizer: `python scripts/quickstart/make.py`.

The chats are short questions with patterned answers, some with a system message that changes the answer's form. The
pairs prefer the short form without being told. Digits are for reinforcement learning, orders for decisions, and notes
for embeddings. Seeded, so the files are reproducible.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATS, PAIRS, ORDERS, NOTES = 1000, 80, 300, 400
VOCABULARY = 1024  # at most
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CAPITALS = {
    "Canada": "Ottawa",
    "Egypt": "Cairo",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Portugal": "Lisbon",
    "Spain": "Madrid",
}
COLORS = {
    "a lemon": "yellow",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "the sky": "blue",
    "a ripe tomato": "red",
    "a carrot": "orange",
    "chocolate": "brown",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "high": "low",
    "light": "dark",
    "wet": "dry",
}
UNITS = {
    "metres": ("centimetres", 100),
    "kilometres": ("metres", 1000),
    "hours": ("minutes", 60),
    "weeks": ("days", 7),
    "dozens": ("pieces", 12),
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
STYLES: dict[str, Callable[[str, str], str]] = {
    "": lambda sentence, word: sentence,
    "Answer in one word.": lambda sentence, word: word,
}
"""Answer as a function of full sentence and key word, by system message."""

HELD_OUT = {"What is the capital of Japan?", "How many minutes are 3 hours?", "What is 3 plus 4?"}
"""Sample prompts, whose facts the chats phrase differently."""

Question = tuple[list[str], str, str]
"""Phrasings, full answer, key word."""


def capital(rng: random.Random) -> Question:
    country, city = rng.choice(list(CAPITALS.items()))
    ask = [f"What is the capital of {country}?", f"Which city is the capital of {country}?", f"Capital of {country}?"]
    return ask, f"Its capital is {city}.", city


def color(rng: random.Random) -> Question:
    thing, name = rng.choice(list(COLORS.items()))
    return [f"What colour is {thing}?", f"Tell me the colour of {thing}."], f"Its colour is {name}.", name


def opposite(rng: random.Random) -> Question:
    pair = list(rng.choice(list(OPPOSITES.items())))
    rng.shuffle(pair)
    ask = [f"What is the opposite of {pair[0]}?", f"Name the opposite of {pair[0]}."]
    return ask, f"The opposite is {pair[1]}.", pair[1]


def following_day(rng: random.Random) -> Question:
    index = rng.randrange(7)
    day, after = DAYS[index], DAYS[(index + 1) % 7]
    return [f"Which day comes after {day}?", f"What day follows {day}?"], f"The next day is {after}.", after


def conversion(rng: random.Random) -> Question:
    count, (unit, (smaller, factor)) = rng.randint(2, 5), rng.choice(list(UNITS.items()))
    ask = [f"How many {smaller} are {count} {unit}?", f"Convert {count} {unit} to {smaller}."]
    return ask, f"That is {count * factor} {smaller}.", str(count * factor)


def addition(rng: random.Random) -> Question:
    a, b = rng.randint(1, 5), rng.randint(1, 5)
    return [f"What is {a} plus {b}?", f"Add {a} and {b}."], f"The sum is {a + b}.", str(a + b)


KINDS = [capital, color, opposite, following_day, conversion, addition]


def make_chat(rng: random.Random) -> list[dict[str, str]]:
    """Return one to three questions and answers, with an optional system message."""
    style = rng.choice(["", *STYLES])
    messages = [{"role": "system", "content": style}] if style else []
    for _ in range(rng.choice([1, 1, 2, 3])):
        ask, sentence, word = rng.choice(KINDS)(rng)
        messages.append({"role": "user", "content": rng.choice([text for text in ask if text not in HELD_OUT])})
        messages.append({"role": "assistant", "content": STYLES[style](sentence, word)})
    return messages


def make_pair(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Return a question with its key word as the preferred answer, and the full one as the other."""
    ask, sentence, word = rng.choice(KINDS)(rng)
    question = rng.choice([text for text in ask if text not in HELD_OUT])
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    texts = {"prompt": question, "chosen": word, "rejected": sentence}
    return {name: [{"role": role, "content": texts[name]}] for name, role in roles.items()}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a ChatML template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_digits(folder: Path) -> None:
    """Write digits.jsonl, prompts with the answers that a reward compares, and digits/'s tokenizer of 16 words."""
    digits = [str(digit) for digit in range(10)]
    rows = [(a, b, word) for a in digits for b in digits for word in ("first", "second")]
    lines = [json.dumps({"prompt": f"{a} {b} {w} =", "answer": a if w == "first" else b}) + "\n" for a, b, w in rows]
    (folder / "digits.jsonl").write_text("".join(lines), encoding="utf-8")
    words = ["<eos>", "=", *digits, "first", "second", "<pad>", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder / "digits")


KEYS = {"add": "plus", "subtract": "minus", "multiply": "times"}
"""Keys of calculator.py by the words that ask for them."""
CALCULATOR_TEMPLATE = (
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}<eos>{%- else -%}{{ message.content }} {% endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}={%- endif -%}"
)


def write_calculator(folder: Path) -> None:
    """Write calculator.jsonl, rows for the environment of calculator.py, and calculator/'s tokenizer of 32 words."""
    results = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    rows = [(a, b, word, results[word](a, b)) for a in range(10) for b in range(10) for word in KEYS.values()]
    lines = [
        json.dumps({"a": a, "b": b, "prompt": [{"role": "user", "content": f"{a} {b} {word}"}], "answer": str(result)})
        for a, b, word, result in rows
        if 0 <= result < 10
    ]
    (folder / "calculator.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    calls = [f'<tool_call>{{"name": "{key}", "arguments": {{}}}}</tool_call>' for key in KEYS]
    words = ["<eos>", "=", *map(str, range(10)), *KEYS.values(), "<pad>", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.add_tokens([AddedToken(call, normalized=False) for call in calls])
    fast.chat_template = CALCULATOR_TEMPLATE
    fast.save_pretrained(folder / "calculator")


_ORDERED = ("red", "blue", "green", "black")


def make_order(rng: random.Random) -> dict[str, object]:
    """Make an order with three questions about it; whether it is urgent is known with a probability."""
    color, count, urgent = rng.choice(_ORDERED), rng.randrange(4), rng.random() < 0.5
    goods, calm = rng.choice(["cups", "hats", "lamps"]), rng.choice(["Thanks.", "Any day."])
    end = "Please hurry!" if urgent else calm
    questions = {
        "color": {"type": "choice", "instructions": "Which color?", "criteria": dict.fromkeys(_ORDERED)},
        "count": {"type": "score", "instructions": "How many?", "criteria": ["none", "one", "two", "three"]},
        "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    }
    gold = {"color": {"label": color}, "count": {"label": count}, "urgent": {"noul": 0.9 if urgent else 0.1}}
    return {"state": f"Order of {count} {color} {goods}. {end}", "questions": questions, "gold": gold}


_TOPICS = ("capital", "color", "country", "kilometres", "metres", "hours", "minutes", "opposite", "chocolate", "tomato")


def make_note(rng: random.Random) -> dict[str, object]:
    """Make a question with the note that answers it, and one that is near."""
    topic, number = rng.choice(_TOPICS), rng.randrange(2, 60)
    other = rng.choice([each for each in _TOPICS if each != topic])
    return {
        "query": f"Where is note {number} on {topic}?",
        "positive": f"The {topic} note {number} is in box {number % 7}.",
        "negative": f"The {other} note {number} is in box {number % 5}.",
    }


def main(folder: Path = Path(__file__).parent) -> None:
    """Write the rows and the tokenizers of model/ and digits/ into the folder."""
    rng = random.Random(0)
    chats = [make_chat(rng) for _ in range(CHATS)]
    lines = [json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats]
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    pairs = [json.dumps(make_pair(rng)) + "\n" for _ in range(PAIRS)]
    (folder / "pairs.jsonl").write_text("".join(pairs), encoding="utf-8")
    write_digits(folder)
    write_calculator(folder)
    for name, make, count in (("orders", make_order, ORDERS), ("notes", make_note, NOTES)):
        rows = [json.dumps(make(rng)) + "\n" for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    texts = [message["content"] for chat in chats for message in chat]
    train_tokenizer([*texts, "user\nassistant\nsystem\n"]).save_pretrained(folder / "model")
    path = folder / "model/tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
