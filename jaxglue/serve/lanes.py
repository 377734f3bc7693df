"""Threads beside the server's loop: for long texts, grammars and large JSON, so that nobody waits behind them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic, sleep

_SHORT = 32_768
"""Characters, or tokens, of a text that takes some milliseconds."""
_REST = 4.0
"""Rest of the thread for large JSON, which holds up all others while it works, as a multiple of that time."""
_long, _grammars, _json = (ThreadPoolExecutor(1, name) for name in ("long texts", "grammars", "large JSON"))


def is_long(length: int) -> bool:
    """Return whether a text of this length has the thread of long ones."""
    return length > _SHORT


async def beside[**P, R](length: int, function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Return a function's result on a text of this length, computed beside the loop."""
    lane = _long if is_long(length) else None
    return await asyncio.get_running_loop().run_in_executor(lane, partial(function, *arguments, **options))


async def compile_grammar[R](make: Callable[[], R]) -> R:
    """Return what reads a grammar, made beside the loop, one at a time: strangers' take up to seconds."""
    return await asyncio.get_running_loop().run_in_executor(_grammars, make)


async def paced[**P, R](function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Return a function's result on large JSON: one at a time, after which others have the processor for a while."""

    def run() -> R:
        begin = monotonic()
        try:
            return function(*arguments, **options)
        finally:
            _json.submit(sleep, _REST * (monotonic() - begin))

    return await asyncio.get_running_loop().run_in_executor(_json, run)
