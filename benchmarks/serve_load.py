"""Measure what a hostile client costs those beside it: `jaxglue serve` with 200 clients, in turns without and with it.

    python benchmarks/serve_load.py --json benchmarks/results/serve_load.json

The server, the clients and the hostile client are processes of one machine. Clients ask for completions of 16 to 48
tokens, one after the other with pauses between; the hostile client sends, again and again, eight bodies of 3.9 MB at a
time (a long text, one of long words, many messages, large tools), 128 prompts with n = 16 in 2 kB, 128 prompts with
n = 2 and long answers, regular expressions and schemas that are deep, and connections whose headers come a byte a
second. The result has the others' latencies on both sides, and the ratios of their medians and 99th percentiles.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import ROOT, write_results

QUICKSTART = ROOT / "jaxglue" / "recipes" / "quickstart" / "model"
KINDS = ("large", "many", "long", "grammars", "headers")
_BODY = 3_900_000
_CONNECTIONS = 50
"""Connections whose headers come a byte a second."""
_START = 20.0
"""Seconds before the first phase, in which clients ask already and the hostile one's process starts."""
_SETTLE = 1.0
"""Seconds at the begin of a phase whose requests do not count: those before it still have an effect."""


async def post(port: int, path: str, body: bytes) -> int:
    """Send a request on a connection of its own; return the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        reply = await reader.read()
    finally:
        writer.close()
    return int(reply.split(b" ", 2)[1]) if reply else 0


async def client(port: int, seed: int, pause: float, samples: list[tuple[float, float, int]], end: float) -> None:
    """Ask again and again, until the end; note when each request began, what it took and its status."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.uniform(0, pause))
    while time.monotonic() < end:
        words = " ".join(rng.choice(("three", "plus", "seven", "what", "is")) for _ in range(rng.randint(3, 40)))
        body = {"prompt": words, "max_tokens": rng.randint(16, 48), "temperature": 1.0, "seed": rng.randint(0, 9999)}
        begin = time.monotonic()
        status = await post(port, "/v1/completions", json.dumps(body).encode())
        samples.append((begin, time.monotonic() - begin, status))
        await asyncio.sleep(min(rng.expovariate(1 / pause), max(end - time.monotonic(), 0)))


def bodies() -> dict[str, list[bytes]]:
    """Return the hostile client's requests by kind; those of one kind are sent together."""

    def chat(**body: object) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 8} | body).encode()

    def complete(**body: object) -> bytes:
        return json.dumps({"prompt": "a", "max_tokens": 900} | body).encode()

    long, rare = "a b " * (_BODY // 4), "ab" * (_BODY // 2)
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "word " * 20}} for i in range(22_000)]
    large = [
        chat(messages=[{"role": "user", "content": long}]),
        chat(messages=[{"role": "user", "content": rare}]),
        chat(messages=[{"role": "user", "content": "a"}] * 100_000),
        chat(messages=[{"role": "user", "content": "a"}] * 900),
        chat(tools=tools),
        complete(prompt=long),
        complete(prompt=rare),
        chat(messages=[{"role": "user", "content": "a", "x": [[]] * (_BODY // 5)}]),
    ]
    properties = {f"p{i}": {"type": "string", "pattern": "(a|b){1,50}c*"} for i in range(200)}
    deep: dict = {"type": "string"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return {
        "large": large,
        "many": [complete(prompt=["a"] * 128, n=16)],
        "long": [complete(prompt=["a b"] * 128, n=2), complete(n=16), complete(n=16), complete(n=16)],
        "grammars": [
            chat(guided_regex="(" * 200 + "a" + ")" * 200, max_tokens=900),
            chat(guided_regex="((a{1,50}){1,50}b?){1,7}", max_tokens=900),
            chat(guided_regex="(" * 30_000 + "a" + ")" * 30_000),
            chat(guided_json={"type": "object", "properties": properties, "required": [*properties]}, max_tokens=900),
            chat(guided_json=deep, max_tokens=900),
        ],
    }


async def _attack(port: int, kind: str, requests: list[bytes], end: float, statuses: dict[str, int]) -> None:
    path = "/v1/chat/completions"
    while time.monotonic() < end:
        paths = [path if b'"messages"' in request else "/v1/completions" for request in requests]
        sent = [post(port, path, request) for path, request in zip(paths, requests, strict=True)]
        with contextlib.suppress(OSError):
            done, under_way = await asyncio.wait(
                map(asyncio.create_task, sent), timeout=max(end - time.monotonic(), 0.1)
            )
            for task in under_way:
                task.cancel()
            for status in [*(task.result() for task in done), *["left"] * len(under_way)]:
                statuses[f"{kind} {status}"] = statuses.get(f"{kind} {status}", 0) + 1
        await asyncio.sleep(0.05)


async def _drip(port: int, end: float) -> None:
    """Send a request's headers a byte a second."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in (b"POST /v1/completions HTTP/1.1\r\nX: " + b"a" * 10_000)[:10_000]:
            if time.monotonic() > end:
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(1)
        writer.close()


def hostile(
    port: int, phases: list[tuple[float, float]], kinds: tuple[str, ...], answers: "multiprocessing.Queue"
) -> None:
    """Attack in phases, begins and ends of `time.monotonic`; put the statuses by kind into the queue."""
    requests, statuses = {kind: sent for kind, sent in bodies().items() if kind in kinds}, dict[str, int]()
    connections = _CONNECTIONS if "headers" in kinds else 0
    answers.put(None)

    async def run() -> None:
        for begin, end in phases:
            await asyncio.sleep(begin - time.monotonic())
            attacks = [_attack(port, kind, bodies, end, statuses) for kind, bodies in requests.items()]
            await asyncio.gather(*attacks, *(_drip(port, end) for _ in range(connections)))

    asyncio.run(run())
    answers.put(statuses)


@contextlib.contextmanager
def server(model: Path, port: int, log: Path):
    """Start the server on random weights; yield its process once it answers."""
    flags = ["--model", model, "--random-weights", "0", "--port", str(port), "--name", "tiny", "--no-request-log"]
    command = [sys.executable, "-m", "jaxglue", "serve", *map(str, flags)]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stderr=file) as run,
    ):
        try:
            while b"serving" not in log.read_bytes():
                assert run.poll() is None, log.read_text()
                time.sleep(0.1)
            yield run
        finally:
            run.terminate()
            run.wait(60)


async def measure(port: int, phases: int, seconds: float, clients: int, pause: float, kinds: tuple[str, ...]) -> dict:
    """Return the others' latencies without and with the hostile client, who sends requests of kinds, in turns."""
    samples: list[tuple[float, float, int]] = []
    begin = time.monotonic() + _START
    end = begin + phases * seconds
    asking = [asyncio.create_task(client(port, i, pause, samples, end)) for i in range(clients)]
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue = context.Queue()
    begins = [begin + phase * seconds for phase in range(1, phases, 2)]
    spans = [(begin, begin + seconds - 1.0) for begin in begins]
    attacker = context.Process(target=hostile, args=(port, spans, kinds, answers))
    attacker.start()
    await asyncio.gather(*asking)
    assert answers.get(timeout=60) is None
    statuses = answers.get(timeout=60)
    attacker.join(60)
    return _summary(samples, begin, phases, seconds) | {"hostile": dict(sorted(statuses.items()))}


def _summary(samples: list[tuple[float, float, int]], begin: float, phases: int, seconds: float) -> dict:
    rows = []
    for phase in range(phases):
        first, last = begin + phase * seconds + _SETTLE, begin + (phase + 1) * seconds
        rows.append([(took, status) for at, took, status in samples if first <= at < last])
    sides = {}
    for name, parts in (("without", rows[::2]), ("with", rows[1::2])):
        times = np.array([took for part in parts for took, _ in part])
        failed = sum(status != 200 for part in parts for _, status in part)
        quantiles = {f"p{q}_s": round(float(np.percentile(times, q)), 3) for q in (50, 99)}
        sides[name] = {"requests": len(times), "failed": failed, **quantiles, "longest_s": round(float(times.max()), 3)}
    ratios = {f"p{q}_ratio": round(sides["with"][f"p{q}_s"] / sides["without"][f"p{q}_s"], 3) for q in (50, 99)}
    longer = round(sides["with"]["longest_s"] - sides["without"]["longest_s"], 3)
    return {**sides, **ratios, "longest_difference_s": longer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=QUICKSTART, help="folder with config.json and tokenizer")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between a client's requests")
    parser.add_argument("--phases", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what the hostile client sends")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a phase")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--gpu", default="none: the CPU", help="name for the result file")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(arguments.model, arguments.port, Path(folder) / "log") as run:
        settings = arguments.phases, arguments.seconds, arguments.clients, arguments.pause, tuple(arguments.kinds)
        result = asyncio.run(measure(arguments.port, *settings))
        memory = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{run.pid}/status").read_text())
        result["server_memory_gib"] = round(int(memory[1]) / 2**20, 2) if memory else None
    result |= {
        "model": arguments.model.name,
        "kinds": arguments.kinds,
        "clients": arguments.clients,
        "pause_s": arguments.pause,
        "phase_s": arguments.seconds,
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        write_results(arguments.json, result, gpu=arguments.gpu)


if __name__ == "__main__":
    main()
