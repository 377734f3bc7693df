"""Train a peer on the batches of benchmarks/sft_step.py; print a JSON line of times, losses and memory, then
another one with its kernels too.

    python benchmarks/peers/train.py --engine unsloth --model DIR --adapter DIR --batches FILE.npz

Times are of steps dispatched back to back, from one step's end on the GPU to the next one's. Lines before that say how
far it is: the model loaded, and each step of the warm-up, in which Unsloth compiles, with the memory used so far.
"""

import argparse
import faulthandler
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator

import engines
import numpy as np


class Steps:
    """LoRA steps of one model: mean cross-entropy per target token, bf16 autocast on GPUs, AdamW."""

    def __init__(self, model, engine: str, learning_rate: float):
        import torch

        self._torch, self.model, self._engine = torch, model, engine
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.01, fused=self.cuda)

    def batch(self, tokens: np.ndarray, lengths: np.ndarray) -> dict:
        """Build a padding-free row: positions from 0 in each document, label -100 at its first token."""
        torch = self._torch
        lengths = lengths[lengths > 0]
        positions = np.concatenate([np.arange(length) for length in lengths])
        ids = torch.tensor(tokens[None].astype(np.int64))
        labels = ids.masked_fill(torch.tensor(positions[None] == 0), -100)
        batch = {"input_ids": ids, "labels": labels, "position_ids": torch.tensor(positions[None])}
        count = torch.tensor(int((labels[:, 1:] != -100).sum()))
        batch = {name: value.to(self.device) for name, value in {**batch, "num_items_in_batch": count}.items()}
        if self._engine == "unsloth":
            return {**batch, "packed_seq_lengths": torch.tensor(lengths.astype(np.int32), device=self.device)}
        if self.cuda:
            bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self.device)
            longest = int(lengths.max())
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return batch

    def __call__(self, batch: dict):
        """Run a step; the loss stays on the device."""
        torch = self._torch
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.cuda):
            loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def mark(self):
        """Mark this moment of the GPU's work."""
        if not self.cuda:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, marks: list) -> list[float]:
        """Return milliseconds between successive marks."""
        self.synchronize()
        pairs = itertools.pairwise(marks)
        return [begin.elapsed_time(end) if self.cuda else (end - begin) * 1e3 for begin, end in pairs]

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            self._torch.cuda.synchronize()

    def kernels(self, batch: dict) -> int:
        """Count the kernels of a step, without copies."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self(batch)
            self.synchronize()
        names = [event.name for event in trace.events() if event.device_type.name == "CUDA"]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


def prepare(args: argparse.Namespace) -> tuple[Steps, list[dict]]:
    """Return the steps of the flags' model and all batches."""
    with np.load(args.batches) as stored:
        tokens, lengths = stored["tokens"], stored["lengths"]
    options = {"quantize": args.quantize, "checkpointing": args.checkpointing, "seq_len": tokens.shape[1]}
    model = engines.load(args.engine, args.model, args.adapter, **options)
    step = Steps(model, args.engine, args.learning_rate)
    return step, [step.batch(*pair) for pair in zip(tokens, lengths, strict=True)]


def measure(args: argparse.Namespace) -> Iterator[dict]:
    """Yield the time until the model is loaded and each step of the warm-up, with peak memory; step times after it, all
    losses and peak memory; then kernels."""
    begun = time.perf_counter()
    step, batches = prepare(args)
    yield {"loaded_s": round(time.perf_counter() - begun, 2)}
    losses, marks, seconds = [], [], []
    for batch in batches[: args.warm_up]:
        begun = time.perf_counter()
        losses.append(step(batch))
        step.synchronize()
        seconds.append(round(time.perf_counter() - begun, 2))
        yield {"warm_up_s": seconds, **peaks(step)}
    if step.cuda:
        step._torch.cuda.reset_peak_memory_stats()
    for batch in batches[args.warm_up :]:
        marks = marks or [step.mark()]
        losses.append(step(batch))
        marks.append(step.mark())
    times = step.milliseconds(marks)
    result = {"ms": statistics.median(times), "ms_all": times, "losses": [float(loss) for loss in losses]}
    result |= {"versions": engines.versions(), "warm_up_s": seconds, **peaks(step)}
    if step.cuda:
        result["attention"] = engines.attention(args.engine, step.model)
    if convolution := engines.convolution(step.model):
        result["convolution"] = convolution
    yield result
    if step.cuda:
        yield result | {"kernels": step.kernels(batches[-1])}


def peaks(step: Steps) -> dict:
    """Return the GPU's name and peak memory; nothing on CPUs."""
    if not step.cuda:
        return {}
    cuda = step._torch.cuda
    allocated, reserved = cuda.max_memory_allocated() / 2**30, cuda.max_memory_reserved() / 2**30
    return {"peak_gib": allocated, "reserved_gib": reserved, "gpu": cuda.get_device_name(0)}


def take_turns(args: argparse.Namespace) -> Iterator[dict]:
    """Warm up; then yield the milliseconds of a step in a run of as many as each line of stdin says."""
    step, batches = prepare(args)
    for batch in batches[: args.warm_up]:
        step(batch)
    step.synchronize()
    if step.cuda:
        step._torch.cuda.reset_peak_memory_stats()
    yield {"versions": engines.versions(), **peaks(step)}
    for line in sys.stdin:
        step(batches[0])
        step.synchronize()
        begun, count = time.perf_counter(), int(line)
        for number in range(count):
            step(batches[number % len(batches)])
        step.synchronize()
        yield {"ms": (time.perf_counter() - begun) / count * 1e3, **peaks(step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=engines.ENGINES, required=True)
    for name in ("model", "adapter", "batches"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--checkpointing", choices=("none", "device", "offload"), default="none")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--turns", action="store_true", help="run steps when stdin says how many (alternate.py)")
    parser.add_argument(
        "--stacks-every",
        type=float,
        help="print where it is each time so many seconds have passed; may end torch.compile",
    )
    args = parser.parse_args()
    if args.stacks_every:
        faulthandler.dump_traceback_later(args.stacks_every, repeat=True)
    for result in take_turns(args) if args.turns else measure(args):
        print(json.dumps(result), flush=True)
    os._exit(0)  # compile workers would linger


if __name__ == "__main__":
    main()
