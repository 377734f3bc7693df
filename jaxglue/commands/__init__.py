"""The `jaxglue` command: one module for each subcommand, imported when it is called, after its flags are read."""

import importlib
import itertools
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from shutil import get_terminal_size
from types import ModuleType
from typing import Any

import jaxglue
from jaxglue.commands.interrupts import STATUS, Interrupts
from jaxglue.commands.streams import standard_streams
from jaxglue.engine.garbage_collection import without_collection


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: `main(config)` in the module of its name, imported once its flags are read."""

    summary: str
    config: str | None = None
    """Module and class of its flags, which load no JAX; None if it has no flags."""
    early: str | None = None
    """Module and function called with the flags before the command's module is imported."""
    task: tuple[str, ...] = ()
    """Further words before the flags."""
    bare: str | None = None
    """Module and function that return flags for words before the first flag, such as a recipe's name."""
    hides_torch: bool = True
    """Hide torch from libraries; False where one fails on a hidden torch."""


_CONFIGS = "jaxglue.commands.configs"
_CACHED = "jaxglue.commands.devices:use_cache"
_RECIPE, _FOLDER, _RUNS, _DATA = (f"jaxglue.commands.bare:{name}" for name in ("recipe", "folder", "runs", "data"))
COMMANDS = {
    "train": Command(
        summary="fine-tune a model",
        config="jaxglue.training.config:TrainConfig",
        early="jaxglue.commands.devices:start_devices",
        bare=_RECIPE,
    ),
    "draft": Command(
        summary="train a draft head for a model that has none, so that it decodes faster",
        config="jaxglue.training.draft_config:DraftConfig",
        early=_CACHED,
    ),
    "chat": Command(
        summary="talk with a model in the terminal",
        config="jaxglue.generation.config:AnsweringConfig",
        early=_CACHED,
        bare=_FOLDER,
    ),
    "generate": Command(
        summary="answer prompts with a model and an adapter",
        config="jaxglue.serve.config:GenerateConfig",
        early=_CACHED,
        bare=_FOLDER,
    ),
    "score": Command(
        summary="score data with a reward model",
        config="jaxglue.serve.config:ScoreConfig",
        early=_CACHED,
    ),
    "evaluate": Command(
        summary="run tasks of lm-evaluation-harness, or measure decisions, embeddings and rankings",
        config="jaxglue.serve.config:EvaluateConfig",
        early=_CACHED,
        hides_torch=False,
    ),
    "embed": Command(
        summary="write embeddings of texts, or mine hard negatives",
        config="jaxglue.serve.config:EmbedConfig",
        early=_CACHED,
        bare=_DATA,
    ),
    "serve": Command(
        summary="serve a model over OpenAI's HTTP interface",
        config="jaxglue.serve.config:ServeConfig",
        early=_CACHED,
        bare=_FOLDER,
    ),
    "export": Command(
        summary="merge an adapter, quantize a model, write a checkpoint, or upload",
        config=f"{_CONFIGS}:ExportConfig",
        early=_CACHED,
    ),
    "estimate": Command(
        summary="predict time and memory of training on a GPU", config=f"{_CONFIGS}:EstimateConfig", bare=_RECIPE
    ),
    "ui": Command(
        summary="show runs on a page: plan, curves, rollouts, samples, chat", config=f"{_CONFIGS}:UiConfig", bare=_RUNS
    ),
    "data": Command(
        summary="preview training data: tokens with loss, lengths, packing",
        config=f"{_CONFIGS}:PreviewConfig",
        task=("preview",),
    ),
    "doctor": Command(
        summary="check driver, CUDA, GPU, JAX, Triton and memory, or a model folder", config=f"{_CONFIGS}:DoctorConfig"
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command named by the first argument; without one, print the list of commands."""
    match sys.argv[1:] if argv is None else list(argv):
        case [] | ["-h" | "--help" | "help", *_]:
            _print(_help())
        case ["--version", *_]:
            _print(f"jaxglue {jaxglue.__version__}")
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
    handler = logging.StreamHandler()
    handler.setFormatter(_Folded("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    with Interrupts() as interrupts, _torch_hidden() if COMMANDS[name].hides_torch else nullcontext():
        try:
            with standard_streams():
                command, config = _prepare(name, sys.argv[1:] if argv is None else argv)
                interrupts.importing = False
                command.main(config)
        except (KeyboardInterrupt, Exception) as error:
            if interrupts.received or isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends the clean-up at once
                status = 128 + getattr(error, "number", signal.SIGINT)  # of a second signal
                _end(f"jaxglue {name}: {'interrupted' if status == STATUS else 'terminated'}", status=status)
            if isinstance(error, (ValueError, OSError)):
                _end(f"error: {error}", status=1)
            if isinstance(error, MemoryError):
                _end(f"error: the host has too little memory: {error or 'for its programs'}", status=1)
            raise


@without_collection()
def _prepare(name: str, argv: Sequence[str]) -> tuple[ModuleType, Any]:
    """Import a command, once its flags are read; return it with its configuration."""
    config = _parse(name, argv)
    if early := COMMANDS[name].early:
        _load(early)(config)
    return importlib.import_module(f"jaxglue.commands.{name}"), config


def _parse(name: str, argv: Sequence[str]) -> Any:
    """Return the configuration of a command's flags."""
    from argparse import ArgumentParser

    from jaxglue.commands.own_kinds import own_kinds
    from jaxglue.parts import note_named
    from jaxglue.settings.flags import parse_config
    from jaxglue.settings.recipe import code_files

    command = COMMANDS[name]
    words, flags = tuple(argv[: len(command.task)]), argv[len(command.task) :]
    if words != command.task:
        if not {"-h", "--help", "--help-all"} & set(argv):
            raise ValueError(f"jaxglue {name}: use jaxglue {' '.join((name, *command.task))} --flag value …")
        flags = argv
    bare = tuple(itertools.takewhile(lambda word: not word.startswith("-"), flags))
    if bare and command.bare:
        flags = [*_load(command.bare)(*bare), *flags[len(bare) :]]
    title = " ".join((name, *command.task))
    if command.config is None:
        return ArgumentParser(f"jaxglue {title}", description=command.summary).parse_args(flags)
    cls, kinds = _load(command.config), own_kinds(_load(command.config), flags)
    config = parse_config(cls, [*flags, *kinds.flags], command=title, trusts=kinds.trusts)
    note_named(code_files(config))
    return config


def _load(name: str) -> Any:
    """Return the object at `module:name`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


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


class _Folded(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        from jaxglue.terminal.lines import fold

        return fold(super().format(record))


def _print(text: str) -> None:
    from jaxglue.terminal.lines import echo

    try:
        with standard_streams():
            echo(text)
    except OSError as error:
        _end(f"error: {error}", status=1)


def _end(line: str, *, status: int) -> None:
    from jaxglue.terminal.lines import echo, fold

    with suppress(OSError):  # a closed terminal
        echo(fold(line), error=True)
    sys.exit(status)


def _help() -> str:
    width = max(map(len, COMMANDS))
    columns, after = get_terminal_size().columns, " " * (width + 4)
    lines = [
        line
        for name, command in COMMANDS.items()
        for line in textwrap.wrap(f"  {name:<{width}}  {command.summary}", columns, subsequent_indent=after)
    ]
    return "\n".join(
        [
            "usage: jaxglue COMMAND [--flag value …]",
            "",
            "Fine-tune open language models in JAX on NVIDIA GPUs.",
            "",
            *lines,
            "",
            "jaxglue COMMAND --help lists a command's flags,",
            "jaxglue --version prints the version.",
        ]
    )
