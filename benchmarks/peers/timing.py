"""Time kernels of peers in PyTorch."""

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
