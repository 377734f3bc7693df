"""Measure decisions over HTTP: clients that ask about states of their own, beside the forward pass of packed rows.

    python benchmarks/decide_serve.py --shape qwen3-4b --clients 512 --seconds 40 --json FILE
    python benchmarks/decide_serve.py --shape tiny --clients 8 --seconds 4 --state 60           # on a CPU

The server is a process with random weights in bf16; each client, one after the other, asks two questions about a state
of some 500 tokens that no other request has, and asks again as soon as it is answered. Prefill's rate is that of full
rows of such units, back to back, in the server's process before it listens: the model's forward pass
alone, with no client. The first requests, in which programs compile, do not count.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from inputs import make_description
from measure import provenance, write_json
from shapes import SHAPES

QUESTIONS = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "kind": {"type": "choice", "instructions": "Which kind?", "criteria": {"bill": None, "order": None, "other": None}},
}
_READY = "listening, prefill "
_WORDS = ("three", "plus", "seven", "what", "is", "order", "of", "the", "red", "cups")


def state(rng: np.random.Generator, words: int) -> str:
    """Draw a state."""
    return " ".join(rng.choice(_WORDS, words)) + f" {rng.integers(1 << 40)}"


def words_for(encode, tokens: int) -> int:
    """Return the words of states that have about so many tokens."""
    rng = np.random.default_rng(0)
    return round(tokens * 1000 / len(encode(state(rng, 1000))))


def serve(args: argparse.Namespace) -> None:
    """Measure prefill's rate, then answer clients until killed."""
    import jax
    import uvicorn

    from jaxglue.data.questions import read_questions
    from jaxglue.generation.config import AssistantConfig
    from jaxglue.generation.reading import LoadedModel, PartReader, decisions
    from jaxglue.serve.config import ServeConfig
    from jaxglue.serve.connections import announcing_server, bounded_protocol
    from jaxglue.serve.reading import ReadService, joined, warm_up
    from jaxglue.serve.server import make_read_app

    model = LoadedModel.load(AssistantConfig(model=args.model, random_weights=0))
    reader = PartReader(model, {"kind": "decide"})
    warm_up(reader)
    words = words_for(model.tokenizer.encode, args.state)
    rng, questions = np.random.default_rng(1), read_questions(QUESTIONS)

    def encode():
        return reader.encode(decisions(reader, [(state(rng, words), questions)]))

    one = len(encode().tokens)
    rows = [joined([encode() for _ in range(max(reader.row // one, 1))]) for _ in range(args.rows)]
    for _ in range(2):  # the first compiles
        begin = time.perf_counter()
        waits = [reader.begin(row) for row in rows]
        for wait in waits:
            wait()
        seconds = time.perf_counter() - begin
    prefill = sum(len(row.tokens) for row in rows) / seconds
    config = ServeConfig(model=args.model, name="model", max_requests=2 * args.clients, request_log=False)
    service = ReadService({"decide": reader}, most=config.max_requests)
    told = {"prefill_tokens_per_s": prefill, "request_tokens": one, "gpu": jax.devices()[0].device_kind, "words": words}
    settings = uvicorn.Config(
        make_read_app(service, config), port=args.port, http=bounded_protocol(), log_level="warning", access_log=False
    )
    announcing_server(settings, lambda: print(_READY + json.dumps(told), flush=True)).run()


async def client(port: int, seed: int, words: int, end: float, samples: list[tuple[float, float, int]]) -> None:
    """Ask again and again on one connection; note when each answer came, what it took and its tokens.

    Raises:
        RuntimeError: a request was refused.
    """
    rng = np.random.default_rng(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    while time.perf_counter() < end:
        body = json.dumps({"model": "model", "state": state(rng, words), "questions": QUESTIONS}).encode()
        begin = time.perf_counter()
        head = f"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        size = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length"))
        answer = await reader.readexactly(size)
        if " 200 " not in status + " ":
            raise RuntimeError(f"{status}: {answer.decode()[:300]}")
        done = time.perf_counter()
        samples.append((done, done - begin, json.loads(answer)["usage"]["input_tokens"]))
    writer.close()


def ask(port: int, seeds: range, words: int, end: float, found: "multiprocessing.Queue") -> None:
    """Run some clients in a process of their own; put their samples into the queue."""

    async def run() -> list[tuple[float, float, int]]:
        samples: list[tuple[float, float, int]] = []
        await asyncio.gather(*(client(port, seed, words, end, samples) for seed in seeds))
        return samples

    found.put(asyncio.run(run()))


def measure(args: argparse.Namespace, told: dict, server: int) -> dict:
    """Return the clients' rate and latencies over the seconds after the warm-up."""
    context = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue = context.Queue()
    begin = time.perf_counter()
    end = begin + args.warm_up + args.seconds
    parts = np.array_split(np.arange(args.clients), min(args.processes, args.clients))
    processes = [
        context.Process(target=ask, args=(args.port, range(p[0], p[-1] + 1), told["words"], end, found)) for p in parts
    ]
    for process in processes:
        process.start()
    time.sleep(max(begin + args.warm_up - time.perf_counter(), 0))
    busy = [cpu_seconds(server), 0.0]
    time.sleep(args.seconds)
    busy[1] = cpu_seconds(server)
    samples = [sample for _ in processes for sample in found.get(timeout=120)]
    for process in processes:
        process.join(60)
    inside = [sample for sample in samples if begin + args.warm_up <= sample[0] < end]
    times = np.array([took for _, took, _ in inside])
    tokens = sum(count for *_, count in inside) / args.seconds
    return {
        "requests": len(inside),
        "requests_per_s": len(inside) / args.seconds,
        "tokens_per_s": tokens,
        "share_of_prefill": tokens / told["prefill_tokens_per_s"],
        "p50_s": float(np.percentile(times, 50)),
        "p99_s": float(np.percentile(times, 99)),
        "server_cpus": (busy[1] - busy[0]) / args.seconds,
    }


def cpu_seconds(process: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--processes", type=int, default=8, help="of clients")
    parser.add_argument("--state", type=int, default=500, help="tokens of a state, about")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds that do not count")
    parser.add_argument("--rows", type=int, default=16, help="rows by which prefill's rate is measured")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--model", type=Path, help="folder of the server's own process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.model:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_description(Path(folder) / "model", SHAPES[args.shape])
        flags = ["--model", f"{folder}/model", "--state", args.state, "--rows", args.rows, "--port", args.port]
        command = [sys.executable, __file__, *map(str, flags), "--clients", str(args.clients)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            try:
                assert run.stdout is not None
                line = next((line for line in run.stdout if line.startswith(_READY)), None)
                assert line is not None, "the server ended"
                told = json.loads(line.removeprefix(_READY))
                result = {"shape": args.shape, "clients": args.clients, **told, **measure(args, told, run.pid)}
            finally:
                run.kill()
    print(json.dumps(result))
    if args.json:
        write_json(args.json, provenance(told["gpu"]) | {"results": result})


if __name__ == "__main__":
    main()
