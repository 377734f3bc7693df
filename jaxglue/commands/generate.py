"""Answer prompts: `jaxglue generate --adapter runs/first/adapter --prompt "Why is the sky blue?"`."""

import json
import sys
from contextlib import nullcontext
from typing import IO, Any

from jaxglue.files.atomic import atomic_file
from jaxglue.serve.answers import answer_rows, prompt_of
from jaxglue.serve.config import STDIN, GenerateConfig
from jaxglue.terminal.lines import echo


def main(config: GenerateConfig) -> None:
    """Print the answers piece by piece, or write them as JSON lines."""
    if config.output is None:
        _print_answers(config)
        return
    file: Any = nullcontext(sys.stdout) if config.output == STDIN else atomic_file(config.output)
    with file as target:
        if config.output == STDIN:
            _write_lines(config, target)
        else:
            with target.open("w", encoding="utf-8", errors="backslashreplace") as lines:
                _write_lines(config, lines)


def _print_answers(config: GenerateConfig) -> None:
    several = config.prompt_file is not None or len(config.prompt) > 1
    for row, answer in answer_rows(config, _say):
        if several:
            echo(f"> {_shown(prompt_of(row))}")
        for piece in answer:
            echo(piece, end="")
        echo()


def _shown(content: Any) -> Any:
    """Return a content as a line shows it: its texts, and the kinds of its other parts without their bytes."""
    if not isinstance(content, list):
        return content
    parts = (part if isinstance(part, dict) else {"text": part} for part in content)
    return "".join(str(part["text"]) if part.get("text") else f"[{part.get('type')}]" for part in parts)


def _write_lines(config: GenerateConfig, file: IO[str]) -> None:
    """Write each row with its `answer`."""
    for row, answer in answer_rows(config, _say):
        print(json.dumps({**row, "answer": "".join(answer)}, ensure_ascii=False), file=file, flush=True)


def _say(line: str) -> None:
    echo(line, error=True)
