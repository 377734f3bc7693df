"""Program: how transformers alone reads a folder's tokenizer, template and stop tokens; imports nothing of jaxglue.

Reads conversations from standard input, writes a JSON line to standard output.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: str) -> None:
    """Write the reading."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # takes ten seconds, and reads no file here
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    reading: dict[str, Any] = {
        "eos token": tokenizer.eos_token,
        "tokens of a text": tokenizer("Good day, 7.")["input_ids"],
    }
    for number, chat in enumerate(json.load(sys.stdin) if tokenizer.chat_template else (), 1):
        prompt = chat["messages"][-1]["role"] != "assistant"
        options: dict[str, Any] = {"tools": chat["tools"], "add_generation_prompt": prompt}
        text: Any = None
        tokens: Any = None
        try:
            text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, **options)
            tokens = tokenizer.apply_chat_template(chat["messages"], **options)["input_ids"]
        except Exception:  # templates are foreign code
            pass
        reading[f"text of conversation {number}"] = text
        reading[f"tokens of conversation {number}"] = tokens
    has_settings = Path(folder, "generation_config.json").is_file()  # without it, models take config.json's
    settings: Any = (GenerationConfig if has_settings else AutoConfig).from_pretrained(folder, local_files_only=True)
    stops = settings.eos_token_id
    stops = [] if stops is None else [stops] if isinstance(stops, int) else stops
    sys.stdout.write(json.dumps({"reading": reading, "stops": stops}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
