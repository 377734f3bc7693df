"""Time episodes whose tools take a while, beside the same episodes with instant tools, on random weights of a shape.

    python benchmarks/agent_turns.py --json benchmarks/results/agent_turns.json
    python benchmarks/agent_turns.py --shape tiny --episodes 8 --turns 3 --tokens 16 --decoding 4 --begun 6 --alone 3

Every turn has the same number of tokens; a tool's time is log-normal (mean 1 s, σ 0.5), and its result some tokens. An
ideal scheduler takes the longer of decoding and of the tools' time over the episodes that wait. Episodes alone, all
decoding at once, take at least the time of the one whose tools take longest: its tools' and that of all turns with
instant tools. Programs are compiled before, by few episodes; `compiled` counts those that were compiled in a
measurement all the same. Each row is written as it comes, the episodes alone first; `--alone 0` leaves them out.
"""

import argparse
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from measure import table, write_results
from shapes import SHAPES

from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.engine import Completion, Engine
from jaxglue.generation.pages import plan_cache
from jaxglue.generation.turns import Turn, decode_turns
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import split_model

PROMPT, RESULT = 200, 32
SIGMA = 0.5
FEW = (1, 2, 4, 8, 16)
"""Episodes whose prompts and results fill rows of each size."""
_BEGUN = time.perf_counter()


def say(text: str) -> None:
    """Print what is done, with the seconds since the beginning."""
    print(f"{time.perf_counter() - _BEGUN:7.1f} s  {text}", flush=True)


class Episodes:
    """A source of turns: a thread sleeps for each tool.

    Args:
        count: episodes.
        turns: of each.
        tokens: of a turn.
        begun: the most episodes under way.
        seconds: [count, turns − 1] of the tools.
    """

    def __init__(self, count: int, turns: int, tokens: int, begun: int, seconds: np.ndarray):
        self._rng, self._turns, self._tokens, self._seconds = np.random.default_rng(0), turns, tokens, seconds
        self._waiting, self.left, self._news = deque(range(count)), count, Condition()
        self._ready, self._released, self._episodes = deque[Turn](), deque[Turn](), dict[Turn, tuple[int, int]]()
        self._threads, self._count = ThreadPoolExecutor(begun), count
        for _ in range(min(begun, count)):
            self._begin()

    def _begin(self) -> None:
        episode = self._waiting.popleft()
        prompt = self._rng.integers(0, 1000, PROMPT).tolist()
        self._add(Turn(prompt, episode, 0, 1, self._tokens, holds=self._turns > 1), episode, 1)

    def _add(self, turn: Turn, episode: int, number: int) -> None:
        with self._news:
            self._episodes[turn] = episode, number
            self._ready.append(turn)
            self._news.notify()

    def take(self, turn: Turn, completion: Completion) -> None:
        episode, number = self._episodes.pop(turn)
        if number == self._turns:
            self.left -= 1
            if self._count >= 64 and self.left % (self._count // 10) == 0:
                say(f"  {self._count - self.left} episodes are over")
            self._released.append(turn)
            if self._waiting:
                self._begin()
            return
        self._threads.submit(self._reply, turn, completion.tokens.tolist(), episode, number)

    def _reply(self, turn: Turn, tokens: list[int], episode: int, number: int) -> None:
        time.sleep(self._seconds[episode, number - 1])
        prompt = [*turn.prompt, *tokens, *range(RESULT)]
        holds = number + 1 < self._turns
        self._add(Turn(prompt, episode, 0, turn.seed + 1, self._tokens, after=turn, holds=holds), episode, number + 1)

    def ready(self) -> list[Turn]:
        with self._news:
            turns = [*self._ready]
            self._ready.clear()
        return turns

    def released(self) -> list[Turn]:
        turns = [*self._released]
        self._released.clear()
        return turns

    def wait(self, seconds: float = 60.0) -> None:
        with self._news:
            self._news.wait_for(lambda: self._ready or not self.left, seconds)

    @property
    def is_over(self) -> bool:
        return self.left == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    for name, value in {"episodes": 512, "turns": 8, "tokens": 128, "decoding": 128, "begun": 256, "alone": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--mean", type=float, default=1.0, help="seconds of a tool")
    parser.add_argument(
        "--memory", type=float, help="GiB of pages and activations; by default nearly all that are free"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = config_from_hf(SHAPES[arguments.shape])
    dtype = jnp.float32 if arguments.shape == "tiny" else jnp.bfloat16
    graphdefs, *trees = split_model(random_model(config, dtype=dtype), nnx.LoRAParam)
    jax.block_until_ready(trees)
    engine = Engine(graphdefs, config, dtype=dtype)
    longest = PROMPT + arguments.turns * arguments.tokens + (arguments.turns - 1) * RESULT
    free = None if arguments.memory is None else arguments.memory * 2**30
    options = {"cache_dtype": dtype, "batch_size": arguments.decoding, "free": free}
    plan = plan_cache([(PROMPT, longest)] * arguments.begun, config, dtype, begun=arguments.begun, **options)
    say(f"weights are there; {plan}, {plan.pages} pages")
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=arguments.tokens)
    seconds = np.random.default_rng(1).lognormal(
        np.log(arguments.mean) - SIGMA**2 / 2, SIGMA, (arguments.episodes, max(arguments.turns - 1, 1))
    )

    def run(count: int, turns: int, tokens: int, waits: bool) -> tuple[float, int]:
        """Return the seconds of a run, and how many programs were compiled in it."""
        before, source = engine.compilations(), Episodes(count, turns, tokens, arguments.begun, seconds * waits)
        begun = time.perf_counter()
        decode_turns(engine, tuple(trees), source, plan, sampling, (), whole=True)
        duration, compiled = time.perf_counter() - begun, engine.compilations() - before
        say(f"{count} episodes of {turns} turns of {tokens} tokens: {duration:.2f} s, {compiled} programs compiled")
        return duration, compiled

    for count in (*(few for few in FEW if few <= arguments.decoding), arguments.decoding):
        run(count, 2, 8, False)
    engine.wait()
    say("windows of all sizes are compiled")
    results = []
    for count in filter(None, dict.fromkeys((min(arguments.alone, arguments.episodes), arguments.episodes))):
        run(min(count, arguments.begun), 2, min(32, arguments.tokens), True)
        runs = [run(count, arguments.turns, arguments.tokens, waits) for waits in (False, True)]
        (instant, first), (waiting, second) = runs
        tools = float(seconds[:count, : arguments.turns - 1].sum(1).max()) if arguments.turns > 1 else 0.0
        results.append(
            {
                "shape": arguments.shape,
                "episodes": count,
                "turns": arguments.turns,
                "tokens": arguments.tokens,
                "decoding": min(count, plan.slots),
                "begun": min(count, arguments.begun),
                "instant s": round(instant, 2),
                "log-normal s": round(waiting, 2),
                "ratio": round(waiting / instant, 3),
                "longest s": round(instant + tools, 2),
                "of the longest": round(waiting / (instant + tools), 3),
                "compiled": first + second,
                "tokens/s": round(count * arguments.turns * arguments.tokens / waiting),
            }
        )
        print(table(results), flush=True)
        if arguments.json:
            write_results(arguments.json, results)


if __name__ == "__main__":
    main()
