"""Measure the preparation of chats: CPU seconds, tokens/s of a core, peak memory, and the tokenizer alone.

python benchmarks/data_preparation.py --model jaxglue/recipes/quickstart/model \
    --json benchmarks/results/data_preparation.json

Chats of two exchanges, about 500 tokens of words drawn by Zipf's law, are written to a JSONL file and prepared by
--workers processes, as `jaxglue train` does. Time is CPU time of all processes, which a busy machine changes less than
the clock; memory is the largest sum of their resident sizes. The tokenizer alone encodes the same messages as whole
texts.
"""

import argparse
import json
import os
import random
import resource
import tempfile
import threading
import time
from itertools import accumulate, batched
from pathlib import Path

import psutil
from measure import write_results

from jaxglue.data.config import DataConfig
from jaxglue.data.prepare import prepare_data
from jaxglue.data.tokenizer import load_tokenizer

SYLLABLES = ["".join(pair) for pair in batched("theronanreheinedndhaatenesofornteatitoitstioleisouarasdertve", 2)]
WORDS, WORDS_IN_MESSAGE = 30_000, 28


def write_chats(path: Path, count: int) -> None:
    """Write chats of two exchanges."""
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(WORDS)]
    weights = [*accumulate(1 / (rank + 2) for rank in range(WORDS))]
    with path.open("w") as file:
        for _ in range(count):
            texts = [" ".join(rng.choices(words, cum_weights=weights, k=WORDS_IN_MESSAGE)) for _ in range(4)]
            turns = zip(("user", "assistant") * 2, texts, strict=True)
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class PeakMemory(threading.Thread):
    """Samples the resident size of this process and its children."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        parent = psutil.Process()
        while True:
            sizes = []
            for process in (parent, *parent.children(recursive=True)):
                try:
                    sizes.append(process.memory_info().rss)
                except psutil.Error:
                    continue
            self.peak = max(self.peak, sum(sizes))
            time.sleep(0.2)


def tokenizer_seconds(backend, path: Path) -> float:
    """Return the CPU time in which the tokenizer alone encodes the messages."""
    with path.open() as file:
        texts = [message["content"] for line in file for message in json.loads(line)["messages"]]
    begin = cpu_seconds()
    for some in batched(texts, 64):
        _ = [encoding.ids for encoding in backend.encode_batch_fast([*some], add_special_tokens=False)]
    return cpu_seconds() - begin


def measure(model: Path, chats: int, workers: int) -> dict:
    """Return the row of the results."""
    tokenizer, memory = load_tokenizer(model), PeakMemory()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        write_chats(path, chats)
        memory.start()
        begin, wall = cpu_seconds(), time.perf_counter()
        config = DataConfig(data=(str(path),), seq_len=8192, cache_dir=f"{folder}/cache", workers=workers)
        report = prepare_data(config, tokenizer).report
        seconds, wall, peak = cpu_seconds() - begin, time.perf_counter() - wall, memory.peak
        megabytes = path.stat().st_size / 1e6
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        alone = tokenizer_seconds(tokenizer.backend_tokenizer, path)
    return {
        "chats": chats,
        "tokens a chat": round(report.train.tokens / chats),
        "workers": workers,
        "seconds": round(wall, 1),
        "CPU seconds": round(seconds, 1),
        "MB": round(megabytes, 1),
        "MB/s of a core": round(megabytes / seconds, 2),
        "tokens/s of a core": round(report.train.tokens / seconds, -3),
        "peak memory GiB": round(peak / 2**30, 2),
        "CPU seconds of the tokenizer on whole texts": round(alone, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with a tokenizer and a chat template")
    parser.add_argument("--chats", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    result = measure(args.model, args.chats, args.workers)
    print(json.dumps(result))
    if args.json:
        write_results(args.json, [result])


if __name__ == "__main__":
    main()
