"""Runs of every kind on a tiny model, as forks of this process, which imports everything once and opens no devices."""

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import jaxglue
import jaxglue.commands.export
import jaxglue.commands.train
import jaxglue.rl.loop
from jaxglue.commands import run
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.export_check import CHECK_FILE
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.draft import DRAFTS, build_draft, parameter_name
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.rl.journal import EpisodeFile
from jaxglue.training import loop
from jaxglue.training.record import read_metrics

QUICKSTART = Path(jaxglue.__file__).parent / "recipes/quickstart"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
SIZES |= {"num_key_value_heads": 1, "initializer_range": 0.3}
HYBRID = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2}
HYBRID |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
REWARDS = """
def even(completion_ids):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""
KEYS = """
import random
import time


class Keys:
    def __init__(self):
        self.turn_reward = None

    def reset(self, **row):
        self.pressed = 0

    def add(self) -> str:
        \"\"\"Press a key.\"\"\"
        return self._press(1)

    def subtract(self) -> str:
        \"\"\"Press a key.\"\"\"
        return self._press(2)

    def multiply(self) -> str:
        \"\"\"Press a key.\"\"\"
        return self._press(3)

    def _press(self, number):
        time.sleep(random.uniform(0, 0.06))
        self.pressed += number
        self.turn_reward = random.random()
        return str(self.pressed % 10)

    def get_reward(self):
        return self.pressed + random.random()


class Saving(Keys):
    def state(self):
        return {"pressed": self.pressed}

    def restore(self, state):
        self.pressed = state["pressed"]
"""
STEPS, SAVE_EVERY, LAST_SAVED = 6, 2, 4
KILLED = -signal.SIGKILL
_PATIENCE = 240
"""Longest wait for the processes of a run, seconds."""


@dataclass(frozen=True)
class Kind:
    """A way to train: flags, in which `{work}` stands for the folder of models and data."""

    flags: str
    devices: int = 1
    processes: int = 1
    model: str = "model"


_ANSWERS = "--data {work}/prompts.jsonl --num-generations 4 --generation-batch-size 8 --max-completion-length 6"
_GRPO = f"--objective grpo --reward {{work}}/rewards.py:even {_ANSWERS} --temperature 0.5"
_EPISODES = "--objective dapo --environment {work}/keys.py:CLASS --data {work}/sums.jsonl --num-generations 4"
_EPISODES += " --generation-batch-size 8 --max-completion-length 24 --max-turns 4 --max-episodes 6"
KINDS = {
    "sft": Kind("--data {work}/chats.jsonl --gradient-accumulation-steps 2 --eval-fraction 0.2 --dropout 0.1"),
    "full": Kind("--data {work}/chats.jsonl --method full --keep both --eval-fraction 0.2 --eval-every 2"),
    "streaming": Kind("--data {work}/chats.jsonl --streaming true --gradient-accumulation-steps 2"),
    "pictures": Kind("--data {work}/pictures.jsonl --random-weights true --eval-fraction 0.2", model="seeing"),
    "pictures-disk": Kind(
        "--data {work}/pictures.jsonl --random-weights true --image-features disk --batch-size 2", model="seeing"
    ),
    "classify": Kind("--data {work}/labels.jsonl --objective classify"),
    "dpo": Kind("--data {work}/pairs.jsonl --objective dpo --reference-cache on"),
    "distill": Kind(f"--objective distill --teacher {{work}}/teacher {_ANSWERS}"),
    "grpo": Kind(_GRPO),
    "grpo-mesh": Kind(f"{_GRPO} --mesh fsdp=2 --batch-size 2", devices=2),
    "episodes": Kind(_EPISODES.replace("CLASS", "Keys"), model="calculator"),
    "episodes-saving": Kind(
        f"{_EPISODES.replace('CLASS', 'Saving')} --importance-sampling-mode none", model="calculator"
    ),
    "drafts": Kind("--data {work}/chats.jsonl --train-draft with --gradient-accumulation-steps 2", model="hybrid"),
    "drafts-after": Kind("--data {work}/chats.jsonl --train-draft after --draft-method full", model="hybrid"),
    "grpo-drafts": Kind(f"{_GRPO} --drafts 2", model="hybrid"),
    "processes": Kind("--data {work}/chats.jsonl --batch-size 2 --eval-fraction 0.2", processes=2),
}


@dataclass(frozen=True)
class End:
    """How a process ended."""

    status: int
    """Of its exit, negative for a signal."""
    output: str

    @property
    def refusal(self) -> str:
        """Return the line of an error that a user can mend; empty where it ended in another way."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        return lines[-1] if self.status == 1 and lines and "Traceback" not in self.output else ""


class TinyRuns:
    """Models and data in a folder, and commands on them."""

    def __init__(self, work: Path):
        self.work, self.compiled, self.tokens = work, work / "compiled", work / "tokens"
        work.mkdir(parents=True, exist_ok=True)
        _adopt_orphans()
        if not (work / "keys.py").exists():
            end = self._wait(self._fork(lambda: _make_inputs(work), "inputs"), "inputs")
            assert end.status == 0, end.output

    def training(self, kind: str, output: Path, *flags: str) -> list[str]:
        """Return the arguments of a run of this kind."""
        common = (
            f"train --model {{work}}/{KINDS[kind].model} --output {output} --steps {STEPS} --save-every {SAVE_EVERY}"
        )
        common += " --log-every 1 --seq-len 96 --workers 1 --learning-rate 1e-2"
        common += f" --cache-dir {self.tokens} --compilation-cache {self.compiled}"
        words = f"{common} {KINDS[kind].flags}".replace("{work}", str(self.work)).split()
        is_resumed = (output / ".jaxglue-run").exists() and "--overwrite" not in flags
        if "full" not in words and "--adapter" not in flags:
            words += ["--rank", "4"]
        return [*words, *flags, *(["--resume"] if is_resumed else [])]

    def train(
        self,
        kind: str,
        output: Path,
        *flags: str,
        stop: Callable[[], None] | None = None,
        after: float = -1,
        victim: int = 0,
    ) -> End:
        """Start a run, or go on with it; `stop` and `after` (see `start`) are for one of its processes, the victim."""
        described, arguments = KINDS[kind], self.training(kind, output, *flags)
        if described.processes == 1:
            return self.start(arguments, stop, after, devices=described.devices)
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        arguments += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(described.processes)]
        children = {}
        for index in range(described.processes):
            words, dying = [*arguments, "--process-id", str(index)], stop if index == victim else None
            children[index] = self._fork(lambda words=words, dying=dying: _command(words, dying, 1), f"process-{index}")
        if after >= 0:
            self._kill_after(children[victim], after)
        ends = {index: self._wait(child, f"process-{index}") for index, child in children.items()}
        self._check_orphans()
        dead = ends.pop(victim)
        if dead.status == KILLED:
            for end in ends.values():  # JAX aborts processes whose coordinator, in process 0, is gone
                is_told = "died" in end.refusal or (victim == 0 and "another task died" in end.output)
                assert is_told, f"status {end.status} after another process died:\n{end.output[-3000:]}"
            return dead
        return next((end for end in ends.values() if end.status), dead)

    def start(
        self, arguments: list[str], stop: Callable[[], None] | None = None, after: float = -1, devices: int = 1
    ) -> End:
        """Run a command to its end.

        Args:
            arguments: of `jaxglue`.
            stop: called in the process before the command, to have it die at some event.
            after: seconds until it is killed, unless negative.
            devices: of the CPU.
        """
        child = self._fork(lambda: _command(arguments, stop, devices), "process-0")
        if after >= 0:
            self._kill_after(child, after)
        end = self._wait(child, "process-0")
        self._check_orphans()
        return end

    def _fork(self, call: Callable[[], None], name: str) -> int:
        sys.stdout.flush()
        if child := os.fork():
            return child
        status = 1
        try:
            log = os.open(self.work / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(log, number)
            call()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _wait(self, child: int, name: str) -> End:
        deadline = time.monotonic() + _PATIENCE
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError(f"a run hangs:\n{(self.work / f'{name}.log').read_text()[-3000:]}")
            time.sleep(0.02)
        output = (self.work / f"{name}.log").read_text(errors="replace")
        return End(os.waitstatus_to_exitcode(ended[1]), output)

    @staticmethod
    def _kill_after(child: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)

    @staticmethod
    def _check_orphans() -> None:
        """Require that processes of a dead run have ended: this process has become their parent."""
        deadline = time.monotonic() + 60
        while True:
            try:
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    assert time.monotonic() < deadline, f"processes outlive their run: {_children()}"
                    time.sleep(0.05)
            except ChildProcessError:
                return


def die_before(event: int, *functions: str) -> Callable[[], None]:
    """Return what kills a process before the call of this number.

    Calls are those of `os`'s functions of these names, of the optimizer step, and for an episode's line.
    """

    def prepare() -> None:
        events = iter(range(event))

        def dying(function):
            def call(*args, **options):
                if next(events, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **options)

            return call

        for name in functions:
            setattr(os, name, dying(getattr(os, name)))
        loop.train_step = dying(loop.train_step)
        EpisodeFile.save = dying(EpisodeFile.save)

    return prepare


def results(folder: Path) -> dict[str, object]:
    """Return what a run is for: losses, answers, rewards, weights and settings of what it exported."""
    lines = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    found: dict[str, object] = {
        "losses": [
            tuple(line.get(key) for key in ("step", "loss", "eval_loss", "reward", "draft_loss")) for line in lines
        ]
    }
    if (answers := folder / "rollouts.jsonl").exists():
        found["answers"] = [json.loads(line) for line in answers.read_text().splitlines()]
    for path in _exported(folder):
        # Exports are checked on the rows of the last step, which a run that was killed after it does not have again.
        if path.suffix in (".safetensors", ".json", ".gguf") and path.name != CHECK_FILE:
            found[str(path.relative_to(folder))] = path.read_bytes().replace(str(folder).encode(), b"RUN")
    return found


def unequal(expected: dict[str, object], found: dict[str, object]) -> list[str]:
    """Return the names of what differs."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def _exported(folder: Path) -> Iterator[Path]:
    for pattern in ("adapter*", "model*", "base"):
        for part in sorted(folder.glob(pattern)):
            yield from (path for path in sorted(part.rglob("*")) if path.is_file())


def _command(arguments: list[str], prepare: Callable[[], None] | None, devices: int) -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    os.environ.setdefault("NPROC", "8")  # a device that waits for another holds a thread
    loop.save_loss_curve = lambda *_: None  # type: ignore[assignment]
    if prepare:
        prepare()
    run(arguments[0], arguments[1:])


def _children() -> list[str]:
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200] for pid in pids]


def _adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, on Linux."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _draft_head(config: DecoderConfig) -> dict[str, jax.Array]:
    """Return the tensors of a random draft head under the names of files."""
    state = nnx.to_flat_state(nnx.state(build_draft(config, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    names = DRAFTS[config.model_type].of(config.num_hidden_layers)
    return {names.stored(parameter_name(path)): value[...] for path, value in state}


def _make_inputs(work: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    sources = {"model": "model", "teacher": "model", "calculator": "calculator", "hybrid": "model", "deep": "model"}
    own = {"hybrid": HYBRID, "deep": {"num_hidden_layers": 3}}
    for seed, (name, source) in enumerate(sources.items()):
        folder = work / name
        folder.mkdir(exist_ok=True)
        for path in (QUICKSTART / source).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        raw = json.loads((folder / "config.json").read_text()) | SIZES | own.get(name, {})
        (folder / "config.json").write_text(json.dumps(raw))
        config = config_from_hf(raw)
        tensors = flatten_names(split_model(random_model(config, dtype=jnp.float32, seed=seed), nnx.Param)[1])
        save_tensors(work / "weights", tensors | (_draft_head(config) if name == "hybrid" else {}))
        (work / "weights/model.safetensors").rename(folder / "model.safetensors")
    make_seeing(work / "seeing")
    chats = (QUICKSTART / "chats.jsonl").read_text().splitlines()[:60]
    pictures = (QUICKSTART / "pictures.jsonl").read_text().splitlines()[:24]
    rows = [{"text": f"day {i} was {'good' if i % 3 else 'bad'}", "label": int(i % 3 > 0)} for i in range(60)]
    for name, lines in {
        "chats": chats,
        "pictures": [line for pair in zip(pictures, chats[::2], strict=False) for line in pair],
        "pairs": (QUICKSTART / "pairs.jsonl").read_text().splitlines()[:24],
        "prompts": (QUICKSTART / "digits.jsonl").read_text().splitlines()[:9],
        "sums": (QUICKSTART / "calculator.jsonl").read_text().splitlines()[:9],
        "labels": map(json.dumps, rows),
    }.items():
        (work / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (work / "rewards.py").write_text(REWARDS)
    (work / "keys.py").write_text(KEYS)


def make_seeing(folder: Path, *layers: str, depth: int = 2) -> None:
    """Write the folder of a tiny model that sees, without weights; its layers are of these kinds, else of both."""
    kinds = layers or ("linear_attention", "full_attention")
    shutil.copytree(QUICKSTART / "seeing", folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= {"num_hidden_layers": len(kinds), "layer_types": kinds}
    raw["text_config"] |= {"hidden_size": 32, "intermediate_size": 48, "linear_num_value_heads": 2}
    raw["text_config"] |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    raw["vision_config"] |= {"depth": depth, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    raw["vision_config"]["out_hidden_size"] = 32
    (folder / "config.json").write_text(json.dumps(raw))
