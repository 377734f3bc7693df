"""The `jaxglue` command: one module for each subcommand, imported when it is called."""

import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jaxglue
from jaxglue.commands.interrupts import STATUS, Interrupts

COMMANDS = {
    "train": "fine-tune a model",
    "chat": "talk with a model in the terminal",
    "generate": "answer prompts with a model and an adapter",
    "export": "merge an adapter into its base, quantize a model, or upload either",
    "estimate": "predict time and memory of training on a GPU",
    "data": "preview training data: tokens with loss, lengths, packing, duplicates",
    "doctor": "check driver, CUDA, GPU, JAX, Triton and memory",
}
"""Summaries by name; a command is `main(argv)` in the module of its name."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command named by the first argument; without one, print the list of commands."""
    match sys.argv[1:] if argv is None else list(argv):
        case [] | ["-h" | "--help" | "help", *_]:
            print(_help())
        case ["--version", *_]:
            print(f"jaxglue {jaxglue.__version__}")
        case [name, *rest] if name in COMMANDS:
            run(name, rest)
        case [name, *_]:
            _end(f"jaxglue: unknown command {name!r}: use one of {', '.join(COMMANDS)}", status=2)


def run(name: str, argv: Sequence[str] | None = None) -> None:
    """Run one command; Ctrl-C ends it with one line and status 130, an error that a user can mend with status 1.

    Args:
        name: of the command.
        argv: its arguments, by default those of the process.
    """
    # Before the imports, some of which would configure it otherwise.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    with Interrupts() as interrupts, _torch_hidden():
        try:
            command = importlib.import_module(f"jaxglue.commands.{name}")
            interrupts.importing = False
            command.main(argv)
        except (KeyboardInterrupt, Exception) as error:
            if interrupts.received or isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends the clean-up at once
                _end(f"jaxglue {name}: interrupted", status=STATUS)
            if isinstance(error, (ValueError, OSError)):
                _end(f"error: {error}", status=1)
            raise


@contextmanager
def _torch_hidden() -> Iterator[None]:
    """Make torch appear not installed, here and in worker processes: libraries import it, for seconds, without use."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ[jaxglue.HIDES_TORCH] = "1"
    try:
        yield
    finally:
        del sys.modules["torch"], os.environ[jaxglue.HIDES_TORCH]


def _end(line: str, *, status: int) -> None:
    print(line, file=sys.stderr)
    sys.exit(status)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: jaxglue COMMAND [--flag value …]",
            "",
            "Fine-tune Llama, Qwen3 and GPT-OSS in JAX on NVIDIA GPUs.",
            "",
            *lines,
            "",
            "jaxglue COMMAND --help lists a command's flags; jaxglue --version prints the version.",
        ]
    )
