"""Measure `jaxglue serve` and `vllm serve` under one client: tokens a second and waits, some requests at a time.

    python benchmarks/serve_peers.py --shape qwen3-8b --json benchmarks/results/serve_peers.json
    python benchmarks/serve_peers.py --servers ours vllm --vllm-path /tmp/vllm/site     # as pack_vllm.py packs it
    python benchmarks/serve_peers.py --shape tiny --servers ours --streams 4 --requests 2 --longest 32   # on a CPU

Both servers hold random weights of the same shape in bf16, one after the other on one GPU. The client sends the same
requests to each, in the same order: random prompts of tokens, answers of lengths drawn once, sampled at temperature 1
from the whole vocabulary, so that (by random weights) nearly none ends early; counted are the tokens that the server
says it made. Rounds of half of the requests, every other one streamed, come first and do not count: programs compile in
them, until a round is hardly faster than those before. Then a round of whole answers, and one of half of the requests,
streamed, for the time to the first token: of those that come all at once, and of those that come one by one, as others
end. Each round has prompts of its own, which no server knows from one before. "steady s" are the seconds from a
server's start until the rounds that count.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from gpus import ask_gpu
from inputs import make_description
from measure import table, write_results
from peers.engines import VLLM_ENVIRONMENT
from peers.host import HostMemory
from shapes import SHAPES

NAME = "model"
END = 0
"""Token that ends an answer."""
ROUNDS, FASTER = 8, 0.03
"""Rounds before those that count, at most, and the part of its time by which one is faster where another follows."""


_AS_JAX = """import jax
jax.config.update("jax_pjrt_client_create_options", {"max_inflight_computations": 32})
from jaxglue.commands import main
main()"""
"""Our server in a process whose host dispatches 32 programs ahead of the GPU, as by JAX's default."""


class Answer(NamedTuple):
    """What the client saw of a request."""

    tokens: int
    first: float
    """Seconds to the first token; to the whole answer, where it does not stream."""
    seconds: float


def make_model(folder: Path, config: dict) -> None:
    """Write a description, and a tokenizer that has a text for each token: some servers send no empty ones."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    make_description(folder, config | {"eos_token_id": END})
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(config["vocab_size"])}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t0").save_pretrained(folder)


def make_requests(
    count: int, vocabulary: int, prompt: tuple[int, int], answer: tuple[int, int], seed: int
) -> list[dict]:
    """Draw the requests of a round; the same for the same arguments, and of the same lengths for any seed."""
    rng = np.random.default_rng(0)
    prompts, answers = (rng.integers(*sizes, size=count, endpoint=True).tolist() for sizes in (prompt, answer))
    rng = np.random.default_rng(seed)
    shared = {"model": NAME, "temperature": 1.0, "top_p": 1.0}
    return [
        {"prompt": rng.integers(END + 1, vocabulary, size).tolist(), "max_tokens": most, **shared}
        for size, most in zip(prompts, answers, strict=True)
    ]


async def ask(port: int, request: dict, *, stream: bool) -> Answer:
    """Send a request on a connection of its own.

    Raises:
        RuntimeError: the server refused it, or told no number of tokens.
    """
    begun, first = time.perf_counter(), None
    body = json.dumps(request | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {}))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    usage, status = None, b""
    try:
        writer.write(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        status = await reader.readline()
        while line := await reader.readline():
            text = line.removeprefix(b"data: ")
            if not text.startswith(b"{"):
                continue
            first = first or time.perf_counter()
            if b'"usage"' in text:
                usage = json.loads(text).get("usage") or usage
    finally:
        writer.close()
    if b" 200 " not in status or usage is None:
        raise RuntimeError(f"{status!r} without usage")
    ended = time.perf_counter()
    return Answer(usage["completion_tokens"], (first or ended) - begun, ended - begun)


async def ask_all(port: int, requests: list[dict], streams: int, *, stream: bool) -> tuple[list[Answer], float]:
    """Send all requests, so many at a time; return the answers, in the requests' order, and the seconds of all."""
    waiting, answers = iter(enumerate(requests)), dict[int, Answer]()

    async def client() -> None:
        for index, request in waiting:
            answers[index] = await ask(port, request, stream=stream)

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(streams)))
    return [answers[index] for index in range(len(requests))], time.perf_counter() - begun


async def ask_both(port: int, requests: list[dict], streams: int) -> float:
    """Send all requests, so many at a time, every other one streamed; return the seconds of all."""
    parts = await asyncio.gather(
        ask_all(port, requests[::2], -(-streams // 2), stream=False),
        ask_all(port, requests[1::2], streams // 2, stream=True),
    )
    return max(seconds for _, seconds in parts)


def warm_up(send: Callable[[int], float], limit: float) -> int:
    """Send rounds until one is hardly faster than the best one before: what is measured afterwards has run before.

    Args:
        send: sends the round of a number, from 1; returns its seconds.
        limit: seconds of all rounds after which none begins.

    Returns:
        The rounds that were sent.
    """
    rounds = list[float]()
    while len(rounds) < ROUNDS and sum(rounds) < limit:
        rounds.append(send(len(rounds) + 1))
        if len(rounds) > 1 and rounds[-1] > (1 - FASTER) * min(rounds[:-1]):
            break
    return len(rounds)


def command_of(server: str, model: Path, port: int, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return a server's command and environment."""
    streams, length = str(max(args.streams)), str(max(args.prompt) + args.longest + 1)
    if server != "vllm":
        flags = [*("--model", str(model), "--random-weights", "0", "--port", str(port), "--name", NAME)]
        flags += ["--batch-size", streams, "--max-requests", str(2 * int(streams)), "--max-length", length]
        run = ["-m", "jaxglue"] if server == "ours" else ["-c", _AS_JAX]
        command = [sys.executable, *run, "serve", *flags, "--no-request-log", *shlex.split(args.ours_flags)]
        return command, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"} | os.environ
    flags = [*("--load-format", "dummy", "--port", str(port), "--served-model-name", NAME, "--max-num-seqs", streams)]
    flags += [
        "--max-model-len",
        length,
        "--dtype",
        "bfloat16",
        "--disable-uvicorn-access-log",
        *shlex.split(args.vllm_flags),
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_PTXAS_PATH")}
    environment |= VLLM_ENVIRONMENT
    environment |= {"PYTHONPATH": str(args.vllm_path)} if args.vllm_path else {}
    return [args.vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *flags], environment


@contextlib.contextmanager
def serving(command: list[str], environment: dict[str, str], port: int, log: Path, limit: float) -> Iterator[float]:
    """Start a server; yield the time when it was started, once it answers, and end it afterwards.

    Raises:
        RuntimeError: another server has the port; or this one ended, or did not answer within `limit` seconds, with the
            end of what it printed.
    """
    if _answers(port):
        raise RuntimeError(f"a server answers at port {port} already: it would be measured in place of {command[2]}")
    begun = time.perf_counter()
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True) as process,
    ):
        try:
            while not _answers(port):
                if process.poll() is not None or time.perf_counter() - begun > limit:
                    raise RuntimeError(f"{command[2]} does not answer: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.2)
            yield begun
        finally:
            process.terminate()  # vLLM ends its engine's process by this
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False


def measure(server: str, model: Path, args: argparse.Namespace, log: Path) -> Iterator[dict]:
    """Yield a row for each number of requests at a time."""
    host = HostMemory()
    command, environment = command_of(server, model, args.port, args)
    with serving(command, environment, args.port, log, args.limit) as begun:
        start = time.perf_counter() - begun
        for streams in args.streams:
            row = {"server": server, "at a time": streams} | send_rounds(streams, args, begun)
            yield row | {"start s": round(start, 1), "host GiB": host.added(), "GPU GiB": gpu_memory()}


def send_rounds(streams: int, args: argparse.Namespace, begun: float) -> dict:
    """Send rounds of so many requests at a time to a server that was started at a time; return what was measured."""
    sizes = SHAPES[args.shape]["vocab_size"], tuple(args.prompt), (args.longest // 4, args.longest)
    draw = partial(make_requests, streams * args.requests // 2, *sizes)
    rounds = warm_up(lambda seed: asyncio.run(ask_both(args.port, draw(seed), streams)), args.warm_up)
    steady = time.perf_counter() - begun
    requests = make_requests(streams * args.requests, *sizes, 0)
    whole, seconds = asyncio.run(ask_all(args.port, requests, streams, stream=False))
    streamed, _ = asyncio.run(ask_all(args.port, draw(ROUNDS + 1), streams, stream=True))
    made = sum(answer.tokens for answer in whole)
    row = {"requests": len(requests), "answers' tokens": made}
    row |= {"tokens/s": round(made / seconds, 1), "seconds": round(seconds, 2)}
    row |= _quantiles("answer s", [answer.seconds for answer in whole])
    first = [answer.first for answer in streamed]
    row |= _quantiles("first token s", first)
    row |= _quantiles("first token s, all at once", first[:streams])
    row |= _quantiles("first token s, one by one", first[streams:])
    return row | {"warm-up rounds": rounds, "steady s": round(steady, 1)}


def told(server: str, model: Path, args: argparse.Namespace, log: Path) -> Iterator[dict]:
    """Yield a server's rows, and its error where one ends it: others are measured all the same."""
    try:
        yield from measure(server, model, args, log)
    except (RuntimeError, OSError, ValueError) as error:  # a line that is cut, as its server ended, is no JSON
        yield {"server": server, "error": f"{type(error).__name__}: {error}"}


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}, p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 99) if values}


def gpu_memory() -> float | None:
    """Return the first GPU's memory in use, GiB; None without one."""
    used = ask_gpu("memory.used")
    return None if used is None else round(float(used) / 1024, 1)


def ratios(rows: list[dict]) -> list[dict]:
    """Return ours beside vLLM, for each number of requests at a time."""
    found = {(row["server"], row["at a time"]): row for row in rows}
    pairs = [(found["ours", n], found["vllm", n]) for server, n in found if server == "ours" and ("vllm", n) in found]
    return [
        {
            "at a time": ours["at a time"],
            "tokens/s, ours of vLLM's": f"{ours['tokens/s'] / theirs['tokens/s']:.2f}",
            "first token, p50": f"{ours['first token s, p50'] / theirs['first token s, p50']:.2f}",
        }
        for ours, theirs in pairs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--servers", nargs="+", choices=("ours", "ours-32-ahead", "vllm"), default=["ours", "vllm"])
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="requests at a time")
    parser.add_argument("--requests", type=int, default=4, help="of a round, for each one at a time")
    parser.add_argument("--prompt", type=int, nargs=2, default=[64, 512], help="least and most tokens of a prompt")
    parser.add_argument("--longest", type=int, default=512, help="most tokens of an answer; the least are a quarter")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--vllm-path", type=Path, help="folder with vLLM and what it needs")
    parser.add_argument("--vllm-flags", default="", help="further flags of vllm serve: --vllm-flags='--a b --c'")
    parser.add_argument("--ours-flags", default="", help="further flags of jaxglue serve, likewise")
    parser.add_argument("--port", type=int, default=8766)
    parser.add_argument("--limit", type=float, default=300, help="seconds until a server must answer")
    parser.add_argument("--warm-up", type=float, default=120, help="seconds after which no round before others begins")
    parser.add_argument("--logs", type=Path, help="folder for what servers print")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # leave the GPU to the servers
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / args.shape
        make_model(model, SHAPES[args.shape])
        for row in chain.from_iterable(told(server, model, args, logs / f"{server}.log") for server in args.servers):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.json:
                write_results(args.json, {"rows": rows, "ratios": ratios(_done(rows))}, gpu=ask_gpu("name") or "none")
    for part in (_done(rows), ratios(_done(rows))):
        if part:
            print(table(part))


def _done(rows: list[dict]) -> list[dict]:
    return [row for row in rows if "error" not in row]


if __name__ == "__main__":
    main()
