"""Time kernels of peers in PyTorch."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch


def milliseconds(function, calls: int = 5, repeats: int = 5) -> float:
    """Return the least mean time of a call."""
    function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return min(times)


def compile_together() -> None:
    """Let Triton compile all configurations of a kernel side by side, before it times each and takes the fastest."""
    from triton import AsyncCompileMode, testing
    from triton.runtime.autotuner import Autotuner

    prune, pool = Autotuner.prune_configs, ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def compiled(self, kwargs):
        configs, args = prune(self, kwargs), self.nargs.values()
        with AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                self.fn.run(*args, **kwargs | {"warmup": True} | config.all_kwargs())
        self._do_bench = lambda call, quantiles: testing.do_bench(call, warmup=5, rep=30, quantiles=quantiles)
        return configs

    Autotuner.prune_configs = compiled
