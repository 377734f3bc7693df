"""Train a peer on the batches of benchmarks/sft_step.py; print a JSON line of times, losses and memory, then
another one with its kernels too.

    python benchmarks/peers/train.py --engine unsloth --model DIR --adapter DIR --batches FILE.npz
    python benchmarks/peers/train.py … --checkpointing offload device none      # the fastest of these

Times are of steps dispatched back to back, from one step's end on the GPU to the next one's. Lines before that say how
far it is: the model loaded, and each step of the warm-up, in which Unsloth compiles, with the memory used so far. Where
several kinds of checkpointing are tried, one after the other from the same adapter, the result is the fastest one's,
and `tried` has the times and memory of all, or why one failed.
"""

import argparse
import faulthandler
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator

import engines
import numpy as np
from host import HostMemory


class Steps:
    """LoRA steps of one model: mean cross-entropy per target token, bf16 autocast on GPUs, AdamW."""

    def __init__(self, model, engine: str, learning_rate: float):
        import torch

        self._torch, self.model, self._engine = torch, model, engine
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trainable, lr=learning_rate, weight_decay=0.01, fused=self.cuda)
        self._losses: list = []

    @property
    def out_of_memory(self) -> type[Exception]:
        """The error of a GPU whose memory is used up."""
        return self._torch.cuda.OutOfMemoryError

    def adapter(self) -> list:
        """Return a copy of what is trained."""
        return [parameter.detach().clone() for parameter in self._trainable]

    def again(self, adapter: list, learning_rate: float) -> "Steps":
        """Return the steps of the same model from an adapter, with the memory of those before given back."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._torch.no_grad():
            for parameter, value in zip(self._trainable, adapter, strict=True):
                parameter.copy_(value)
        self._losses.clear()
        del self._optimizer
        gc.collect()
        if self.cuda:
            self._torch.cuda.empty_cache()
        return Steps(self.model, self._engine, learning_rate)

    def losses(self) -> list[float]:
        """Return the losses of all steps."""
        return [float(loss) for loss in self._losses]

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

    def __call__(self, batch: dict) -> None:
        """Run a step; the loss stays on the device."""
        torch = self._torch
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.cuda):
            loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())

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
    """Return the steps of the flags' model, of the first kind of checkpointing, and all batches."""
    with np.load(args.batches) as stored:
        tokens, lengths = stored["tokens"], stored["lengths"]
    args.checkpointing, args.seq_len = engines.known_checkpointing(args.engine, args.checkpointing), tokens.shape[1]
    engines.compile_kernels_together()
    options = {"quantize": args.quantize, "checkpointing": args.checkpointing[0], "seq_len": args.seq_len}
    model = engines.load(args.engine, args.model, args.adapter, **options)
    step = Steps(model, args.engine, args.learning_rate)
    return step, [step.batch(*pair) for pair in zip(tokens, lengths, strict=True)]


def measure(args: argparse.Namespace) -> Iterator[dict]:
    """Yield the times until packages and the model are loaded; the result of the fastest kind of checkpointing so far,
    with what all tried took; then its kernels, where it was the only one."""
    begun = time.perf_counter()
    engines.import_packages(args.engine)
    yield {"imported_s": round(time.perf_counter() - begun, 2)}
    if args.wait:
        sys.stdin.readline()
    begun, host = time.perf_counter(), HostMemory()  # what another engine pinned until now is no part of it
    step, batches = prepare(args)
    yield {"loaded_s": round(time.perf_counter() - begun, 2)}
    adapter = step.adapter()
    tried: list[dict] = []
    best: dict = {}
    for number, kind in enumerate(args.checkpointing):
        begun = time.perf_counter()
        try:
            if number:
                step = step.again(adapter, args.learning_rate)
                engines.set_checkpointing(args.engine, step.model, kind, args.seq_len)
            for seconds in warm_up(step, batches[: args.warm_up]):
                yield {"warm_up_s": seconds} | ({} if number else peaks(step))
            found = {"checkpointing": kind, **timed(step, batches[args.warm_up :]), "host_gib": host.added()}
        except step.out_of_memory as error:
            found = {"checkpointing": kind, "error": str(error).splitlines()[0]}
        if "ms" in found:
            found["losses"] = step.losses()
            best = min(found, best, key=lambda each: each.get("ms", np.inf))
        tried.append({name: found[name] for name in _TRIED if name in found})
        tried[-1]["seconds"] = round(time.perf_counter() - begun, 1)
        yield best | {"tried": tried} | facts(step, args.engine)
    if step.cuda and len(tried) == 1 and best:
        yield best | {"kernels": step.kernels(batches[-1])}


_TRIED = "checkpointing", "ms", "peak_gib", "reserved_gib", "host_gib", "error"


def warm_up(step: Steps, batches: list[dict]) -> Iterator[list[float]]:
    """Run the first steps; yield the seconds of those done."""
    seconds: list[float] = []
    for batch in batches:
        begun = time.perf_counter()
        step(batch)
        step.synchronize()
        seconds.append(round(time.perf_counter() - begun, 2))
        yield seconds


def timed(step: Steps, batches: list[dict]) -> dict:
    """Return the times of steps and peak memory."""
    if step.cuda:
        step._torch.cuda.reset_peak_memory_stats()
    marks = [step.mark()]
    for batch in batches:
        step(batch)
        marks.append(step.mark())
    times = step.milliseconds(marks)
    return {"ms": statistics.median(times), "ms_all": times, **peaks(step)}


def facts(step: Steps, engine: str) -> dict:
    """Return versions, and what computed attention and convolutions."""
    found = {"versions": engines.versions()}
    if step.cuda:
        found["attention"] = engines.attention(engine, step.model)
    if convolution := engines.convolution(step.model):
        found["convolution"] = convolution
    return found


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
    parser.add_argument("--checkpointing", nargs="+", choices=engines.CHECKPOINTING, default=["none"])
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--wait", action="store_true", help="before the model is loaded, wait for a line of stdin")
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
