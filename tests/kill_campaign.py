"""Kill runs and exports again and again at random moments, go on, and compare with undisturbed ones.

    JAX_PLATFORMS=cpu python tests/kill_campaign.py --kills 60 --seed 1
    JAX_PLATFORMS=cpu python tests/kill_campaign.py --kinds sft grpo-mesh --kills 10

Half of the kills come right before an event (an optimizer step, a rename, a deletion, a sync to disk, an episode's
line), the others at a random time. Which episodes decode together depends on the times of tools, and with it the last
bits of log-probabilities: of runs with environments it is compared what was on disk when they were killed, and all but
those where training does not read them.
"""

import argparse
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_runs import KILLED, KINDS, End, TinyRuns, die_before, results, unequal

from jaxglue.rl.episodes import read_sample
from jaxglue.rl.journal import EPISODES, EpisodeFile
from jaxglue.training.run_folder import is_replaced, output_folder

EPISODE_KINDS = ("episodes", "episodes-saving")
EVENTS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")
Stop = dict[str, object]
"""When to kill: arguments of `TinyRuns.start`."""


class Whole:
    """What an undisturbed process leaves, how long it takes, and how many events it has."""

    def __init__(self, start: Callable[..., End], read: Callable[[], dict[str, object]], work: Path):
        began, counted = time.monotonic(), work / "events"
        end = start(stop=lambda: _count_events(counted))
        assert end.status == 0, end.output[-3000:]
        self.seconds, self.events, self.results = time.monotonic() - began, len(counted.read_bytes()), read()

    def moments(self, rng: random.Random) -> Iterator[Stop]:
        """Yield random moments of it, in turn events and times."""
        while True:
            yield {"stop": die_before(rng.randrange(self.events), *EVENTS)}
            yield {"after": rng.uniform(0.1, 0.95) * self.seconds}


def _count_events(path: Path) -> None:
    """Have this process append a byte to a file at each event."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    from jaxglue.training import loop

    def counting(function):
        def call(*args, **options):
            os.write(file, b".")
            return function(*args, **options)

        return call

    for name in EVENTS:
        setattr(os, name, counting(getattr(os, name)))
    loop.train_step = counting(loop.train_step)
    EpisodeFile.save = counting(EpisodeFile.save)


def kill_runs(runs: TinyRuns, kind: str, kills: int, rng: random.Random) -> Counter:
    """Kill runs of a kind and resume them; return counts of what happened."""
    folder, done = runs.work / "run", Counter()
    whole = Whole(lambda **stop: runs.train(kind, folder, **stop), lambda: results(folder), runs.work)
    shutil.rmtree(folder)
    moments = whole.moments(rng)
    while done["kills"] < kills:
        victim = rng.randrange(KINDS[kind].processes)
        done += _ended(runs.train(kind, folder, **next(moments), victim=victim), folder, whole)
    return done + _ended(runs.train(kind, folder), folder, whole)


def _ended(end: End, folder: Path, whole: Whole) -> Counter:
    """Judge how a run ended; compare and remove a whole one."""
    if end.status == KILLED:
        return Counter(kills=1)
    assert end.status == 0, f"a resumed run failed with status {end.status}:\n{end.output[-3000:]}"
    assert not (names := unequal(whole.results, results(folder))), f"{names} differ"
    _check_no_remains(folder)
    shutil.rmtree(folder)
    return Counter(whole=1)


class KeptEpisodes:
    """What killed runs with an environment had on disk, and the run that goes on from it has at its end."""

    def __init__(self):
        self._lines: dict[tuple[int, int], dict[str, object]] = {}
        """Of whole generations, by step and place."""
        self._parts: dict[tuple[int, int], tuple[list, list, bool]] = {}
        """Messages and log-probabilities of episodes under way, and whether these had ended."""
        self.said = ""
        """The line that the next run must print."""

    def read(self, folder: Path, per_step: int, answers: int) -> None:
        """Read the folder of a killed run."""
        self._lines |= _by_place(_whole_lines(folder / "rollouts.jsonl"))
        self.said = ""
        for path in (folder / "rollouts").glob(f"*{EPISODES}"):
            step, last = int(re.findall(r"\d+", path.name)[0]), dict[str, dict]()
            for line in _whole_lines(path, digest=16)[1:]:
                last[line["key"]] = line["episode"]
            ended = sum("sample" in episode for episode in last.values())
            if last and not path.with_name(f"step-{step}.npz").exists():
                self.said = f"{ended} had ended and {len(last) - ended} go on from their turn"
            for key, episode in last.items():
                number, answer = map(int, key.split("."))
                self._parts[step + 1, number % per_step * answers + answer] = _said(episode)

    def check(self, folder: Path) -> int:
        """Require all of it of a whole run, to the bit; return the number of episodes."""
        lines = _by_place(_whole_lines(folder / "rollouts.jsonl"))
        for place, line in self._lines.items():
            assert lines[place] == line, f"the answer at {place} differs"
        for place, (messages, log_probs, ended) in self._parts.items():
            turns, found = lines[place]["turns"], lines[place]["log_probs"]
            if not ended:
                turns, found = turns[: len(messages)], found[: len(log_probs)]
            assert (turns, found) == (messages, log_probs), f"the episode at {place} did not go on"
        return len(self._lines) + len(self._parts)


def _whole_lines(path: Path, digest: int = 0) -> list[dict]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line[digest:]) for line in lines if line.endswith(b"\n")]


def _by_place(lines: list[dict]) -> dict[tuple[int, int], dict]:
    """Return lines by their step and their number among those of the step."""
    counts = Counter[int]()
    found = {}
    for line in lines:
        step = line["step"]
        found[step, counts[step]] = line
        counts[step] += 1
    return found


def _said(episode: dict) -> tuple[list, list, bool]:
    """Return the messages and log-probabilities of an episode on disk, and whether it had ended."""
    ended = "sample" in episode
    parts = [episode["sample"]] if ended else episode["parts"]
    values = [float(x) for part in parts for x in read_sample(part).log_probs]
    messages = episode["sample"]["episode"]["messages"] if ended else episode["messages"]
    return messages, [None if np.isnan(x) else round(x, 4) for x in values], ended


def _but_log_probs(found: dict[str, Any]) -> dict[str, object]:
    """Return results without log-probabilities of sampling, of which only a correction for sampling reads some."""
    return found | {"answers": [line | {"log_probs": None} for line in found["answers"]]}


def kill_episodes(runs: TinyRuns, kind: str, kills: int, rng: random.Random) -> Counter:
    """Kill runs with an environment and resume them; return counts of what happened."""
    folder, done, kept = runs.work / "run", Counter(), KeptEpisodes()
    whole = Whole(lambda **stop: runs.train(kind, folder, **stop), lambda: results(folder), runs.work)
    shutil.rmtree(folder)
    moments = whole.moments(rng)
    while done["kills"] < kills or folder.exists():
        end = runs.train(kind, folder, **(next(moments) if done["kills"] < kills else {}))
        if end.status == KILLED:
            kept.read(folder, per_step=2, answers=4)
            done += Counter(kills=1, inside=bool(kept.said))
            continue
        assert end.status == 0, f"a resumed run failed with status {end.status}:\n{end.output[-3000:]}"
        assert ("go on from their turn" in end.output) == bool(kept.said) and kept.said in end.output, kept.said
        done += Counter(whole=1, compared=kept.check(folder))
        found = results(folder)
        done["equal to an undisturbed run"] += not unequal(whole.results, found)
        differing = unequal(_but_log_probs(whole.results), _but_log_probs(found))
        done["equal but for log-probabilities"] += not differing
        assert not differing or "--importance-sampling-mode none" not in KINDS[kind].flags, f"{differing} differ"
        _check_no_remains(folder)
        shutil.rmtree(folder)
        kept = KeptEpisodes()
    return done


def kill_overwrites(runs: TinyRuns, kills: int, rng: random.Random) -> Counter:
    """Kill runs that replace another: the folder holds the old run whole, or a new one that goes on to its end."""
    folder, old_folder, done = runs.work / "run", runs.work / "old", Counter()
    assert runs.train("sft", folder, "--seed", "1").status == 0
    old = results(folder)
    shutil.copytree(folder, old_folder)
    new_flags = ("--seed", "2", "--overwrite")
    whole = Whole(lambda **stop: runs.train("sft", folder, *new_flags, **stop), lambda: results(folder), runs.work)
    assert unequal(old, whole.results)
    moments = whole.moments(rng)
    while done["kills"] < kills:
        shutil.rmtree(folder)
        shutil.copytree(old_folder, folder)
        end = runs.train("sft", folder, *new_flags, **next(moments))
        if end.status == KILLED:
            done["kills"] += 1
            done["replaced before"] += is_replaced(folder)
            with output_folder(folder, resume=True):
                is_old = '"seed": 1' in _seed_of(folder)
            if is_old:
                assert not (names := unequal(old, results(folder))), f"{names} of the old run differ"
                done["old whole"] += 1
                end = runs.train("sft", folder, *new_flags)
            else:
                assert any(path.name.isdigit() for path in (folder / "checkpoints").iterdir()), "both runs are lost"
                done["new resumed"] += 1
                end = runs.train("sft", folder, "--seed", "2")
        assert end.status == 0, end.output[-3000:]
        assert not (names := unequal(whole.results, results(folder))), f"{names} differ"
        _check_no_remains(folder)
    return done


def _seed_of(folder: Path) -> str:
    import tomllib

    return json.dumps({"seed": tomllib.loads((folder / "config.toml").read_text())["data"]["seed"]})


EXPORTS = {
    "export-gguf": "--gguf q8_0 --adapter {work}/trained/adapter",
    "export-merge": "--adapter {work}/trained/adapter",
    "export-checkpoint": "--run {work}/trained --checkpoint 4",
}


def kill_exports(runs: TinyRuns, name: str, kills: int, rng: random.Random) -> Counter:
    """Kill exports: each leaves its folder whole or not at all, and the next one removes what a killed one left."""
    trained, folder, done = runs.work / "trained", runs.work / "exports/model", Counter()
    if not trained.exists():
        assert runs.train("sft", trained).status == 0
    arguments = f"export {EXPORTS[name]} --output {folder}".replace("{work}", str(runs.work)).split()
    whole = Whole(lambda **stop: runs.start(arguments, **stop), lambda: _files(folder), runs.work)
    assert whole.results
    moments = whole.moments(rng)
    while done["kills"] < kills:
        shutil.rmtree(folder, ignore_errors=True)
        if runs.start(arguments, **next(moments)).status == KILLED:
            done["kills"] += 1
            if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
                assert not (names := unequal(whole.results, _files(folder))), f"{names} are half-written"
                done["export whole"] += 1
                continue
            end = runs.start(arguments)
            assert end.status == 0, end.output[-3000:]
        assert not (names := unequal(whole.results, _files(folder))), f"{names} differ"
        assert [path.name for path in folder.parent.iterdir()] == [folder.name], "remains of a killed export"
        done["export again"] += 1
    return done


def kill_heads(runs: TinyRuns, kills: int, rng: random.Random) -> Counter:
    """Kill trainings of a draft head and go on with them; return counts of what happened."""
    folder, done = runs.work / "exports/head", Counter()
    words = f"draft --model {runs.work}/deep --data {runs.work}/chats.jsonl --output {folder} --drafts 1 --epochs 2"
    words += f" --max-tokens 6 --seq-len 96 --batch-size 4 --save-every 2 --compilation-cache {runs.compiled}"
    whole = Whole(lambda **stop: runs.start(words.split(), **stop), lambda: _files(folder), runs.work)
    moments, status = whole.moments(rng), 0
    while done["kills"] < kills or status == KILLED:
        if [path.name for path in folder.parent.iterdir()] == [folder.name]:  # also if killed at its very end
            assert not (names := unequal(whole.results, _files(folder))), f"{names} differ"
            shutil.rmtree(folder)
            done["whole"] += 1
        end = runs.start([*words.split(), "--resume"], **(next(moments) if done["kills"] < kills else {}))
        status = end.status
        assert status in (0, KILLED), end.output[-3000:]
        done["kills"] += status == KILLED
    assert not (names := unequal(whole.results, _files(folder))), f"{names} differ"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "remains of a killed run"
    return done + Counter(whole=1)


def _files(folder: Path) -> dict[str, object]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _check_no_remains(folder: Path) -> None:
    names = [path.name for path in folder.rglob("*") if path.suffix in (".tmp", ".old") or "orbax" in path.name]
    names += [path.name for path in folder.glob(".jaxglue-old-*")]
    assert not names, f"remains of killed processes: {names}"


CAMPAIGNS: dict[str, Callable[[TinyRuns, int, random.Random], Counter]] = {
    **{
        kind: lambda runs, kills, rng, kind=kind: (kill_episodes if kind in EPISODE_KINDS else kill_runs)(
            runs, kind, kills, rng
        )
        for kind in KINDS
    },
    **{name: lambda runs, kills, rng, name=name: kill_exports(runs, name, kills, rng) for name in EXPORTS},
    "overwrite": kill_overwrites,
    "head": kill_heads,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the campaign of the arguments; a kind that fails is an error with its seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=CAMPAIGNS, default=list(CAMPAIGNS))
    parser.add_argument("--kills", type=int, default=60, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder of models, data and compiled programs")
    args = parser.parse_args(argv)
    total = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        runs = TinyRuns(args.work or Path(scratch))
        for number, kind in enumerate(args.kinds):
            kills = len(range(number, args.kills, len(args.kinds)))
            if kills:
                for leftover in ("run", "old", "exports"):
                    shutil.rmtree(runs.work / leftover, ignore_errors=True)
                done = CAMPAIGNS[kind](runs, kills, random.Random(f"{args.seed} {kind}"))
                print(f"{kind}, seed {args.seed}: {dict(done)}", flush=True)
                total += done
    print(f"{total['kills']} kills, all equal")


if __name__ == "__main__":
    main()
