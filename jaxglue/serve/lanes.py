"""Threads beside the server's loop: one for long texts and one for grammars, so that nobody waits behind them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

_SHORT = 32_768
"""Characters, or tokens, of a text that takes some milliseconds."""
_long, _grammars = ThreadPoolExecutor(1, "long texts"), ThreadPoolExecutor(1, "grammars")


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
