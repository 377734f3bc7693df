"""Kill a run again and again at random moments, resume it each time, and compare it with an undisturbed one.

    python tests/training/kill_campaign.py RECIPE.toml --kills 100

Each run is a fork of this process, which imports everything once and never starts JAX's devices. A run is killed right
before one of its events, which are spread over a run: optimizer steps, renames, and syncs to disk.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import jax

from jaxglue.settings.recipe import load_config
from jaxglue.training import loop
from jaxglue.training.config import TrainConfig
from jaxglue.training.record import read_metrics
from jaxglue.training.train import train

_LATEST = 160
"""The last event before which a run is killed, unless it ends before."""
_KILLED = -signal.SIGKILL


def main(argv: Sequence[str] | None = None) -> None:
    """Run the campaign of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    config, rng = load_config(TrainConfig, given.recipe), random.Random(given.seed)
    whole, killed = (given.recipe.parent / name for name in ("whole", "killed"))
    assert _run(config, whole) == 0
    kills = ends = 0
    parts = [_LATEST * (part + rng.random()) // given.kills for part in range(given.kills)]
    events = cycle(map(int, rng.sample(parts, given.kills)))
    while kills < given.kills:
        status = _run(config, killed, die_before=next(events))
        assert status in (0, _KILLED), f"a resumed run failed with status {status} after {kills} kills"
        kills += status == _KILLED
        if status == 0:
            ends += 1
            _compare(whole, killed)
            shutil.rmtree(killed)
    assert _run(config, killed) == 0
    _compare(whole, killed)
    print(f"{kills} kills, {ends + 1} whole runs, all equal")


def _run(config: TrainConfig, folder: Path, die_before: int | None = None) -> int:
    """Train, or resume, in a fork; return its exit status, negative for a signal."""
    sys.stdout.flush()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        if die_before is not None:
            _die_before(die_before)
        resume = (folder / ".jaxglue-run").exists()
        train(dataclasses.replace(config, run=dataclasses.replace(config.run, output=folder, resume=resume)))
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        os._exit(status)


def _die_before(event: int) -> None:
    """Kill this process before the event of this number."""
    events = iter(range(event))

    def dying(function):
        def call(*args, **options):
            if next(events, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    for name in ("rename", "replace", "fsync"):
        setattr(os, name, dying(getattr(os, name)))
    loop.train_step = dying(loop.train_step)


def _compare(whole: Path, killed: Path) -> None:
    assert _losses(whole) == _losses(killed), "losses differ"
    results, others = _results(whole), _results(killed)
    assert results, "no result"
    assert results.keys() == others.keys(), f"{sorted(results)} became {sorted(others)}"
    assert not (unequal := [name for name in results if results[name] != others[name]]), f"{unequal} differ"


def _losses(run: Path) -> list[tuple]:
    return [
        tuple(line.get(key) for key in ("step", "loss", "eval_loss")) for line in read_metrics(run / "metrics.jsonl")
    ]


def _results(run: Path) -> dict[str, object]:
    """Return the weights of adapter, base and model, and the adapter's settings but the path of its base."""
    found: dict[str, object] = {
        f"{folder}/{path.name}": path.read_bytes()
        for folder in ("adapter", "base", "model")
        for path in (run / folder).glob("*.safetensors")
    }
    if (settings := run / "adapter/adapter_config.json").exists():
        found["settings"] = json.loads(settings.read_text()) | {"base_model_name_or_path": None}
    return found


if __name__ == "__main__":
    main()
