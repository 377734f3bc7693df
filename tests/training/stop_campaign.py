"""Stop `jaxglue train` in every way that ends runs from outside, and print exit status and output of each.

    python tests/training/stop_campaign.py RECIPE.toml

Each run is a fork of this process on a terminal of its own, whose standard output may be a pipe.
"""

import dataclasses
import json
import os
import pty
import signal
import sys
from pathlib import Path

import jax

from jaxglue.commands import run
from jaxglue.settings.recipe import load_config, to_toml
from jaxglue.training import loop
from jaxglue.training.config import TrainConfig

_AT = 3
"""The step before which a run is stopped."""


def interrupt() -> None:
    """Send Ctrl-C to the run."""
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    """Send SIGTERM to the run."""
    os.kill(os.getpid(), signal.SIGTERM)


def hang_up() -> None:
    """Close the run's terminal, as its owner does."""
    os.kill(os.getppid(), signal.SIGUSR1)
    signal.sigtimedwait([], 1)


def hang_up_ignored() -> None:
    """Send SIGHUP to a run under `nohup`."""
    os.kill(os.getpid(), signal.SIGHUP)


def close_pipe() -> None:
    """Close the reading end of the run's output."""
    os.close(_pipe[0])


STOPS = (interrupt, terminate, hang_up, hang_up_ignored, close_pipe)
_pipe: tuple[int, int]


def main(recipe: Path) -> None:
    """Stop runs of a recipe."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    for stop in STOPS:
        config = load_config(TrainConfig, recipe)
        output = recipe.parent / stop.__name__
        again = recipe.with_name(f"{stop.__name__}.toml")
        again.write_text(to_toml(dataclasses.replace(config, run=dataclasses.replace(config.run, output=output))))
        status, text = _run(again, stop)
        saved = sorted(entry.name for entry in (output / "checkpoints").iterdir())
        print(json.dumps({"stop": stop.__name__, "status": status, "saved": saved, "output": text}), flush=True)


def _run(recipe: Path, stop) -> tuple[int, str]:
    """Train in a fork with a terminal of its own; return its exit status and what the terminal showed."""
    child, terminal = pty.fork()
    if not child:
        _train(recipe, stop)
    shown, is_open = [], True

    def close(*_: object) -> None:
        nonlocal is_open
        is_open = False

    signal.signal(signal.SIGUSR1, close)
    while is_open:
        try:
            shown.append(os.read(terminal, 4096))
        except OSError:  # the run has ended
            break
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), b"".join(shown).decode()


def _train(recipe: Path, stop) -> None:
    global _pipe
    # The tests may themselves run in a shell's background, or under `nohup`.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if stop is hang_up_ignored else signal.SIG_DFL)
    if stop is close_pipe:
        _pipe = os.pipe()
        os.dup2(_pipe[1], 1)
        os.close(_pipe[1])
    train_step = loop.train_step

    def stopping(parts, state, *arguments):
        if state.step == _AT - 1:
            stop()
        return train_step(parts, state, *arguments)

    loop.train_step = stopping
    status = 0
    try:
        run("train", ["--recipe", str(recipe)])
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException as error:
        print(f"traceback: {type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    os._exit(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
