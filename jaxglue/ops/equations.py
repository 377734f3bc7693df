"""Equations of traced programs, through the programs that they call."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Var

_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters of equations that call a program."""


def branch(eqn) -> ClosedJaxpr:
    """Return the CUDA branch of a choice by platform, and the last branch of any other choice."""
    branches, platforms = eqn.params["branches"], eqn.params.get("branches_platforms") or ()
    return next((b for b, p in zip(branches, platforms, strict=False) if p and "cuda" in p), branches[-1])


def called(eqn) -> ClosedJaxpr | None:
    """Return the program that an equation only calls, if it does."""
    for key in _PROGRAMS:
        inner = eqn.params.get(key)
        if isinstance(inner, ClosedJaxpr):
            return inner
        if isinstance(inner, Jaxpr):
            return ClosedJaxpr(inner, ())
    return None


def equations(jaxpr: Jaxpr, repeat: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield a program's equations, those that it calls included, and how often each runs."""
    for eqn in jaxpr.eqns:
        if (inner := branch(eqn) if eqn.primitive.name == "cond" else called(eqn)) is None:
            yield eqn, repeat
        else:
            yield from equations(inner.jaxpr, repeat * eqn.params.get("length", 1))


@lru_cache(maxsize=64)
def live_program(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program without equations whose results nothing needs, as XLA compiles it."""
    return ClosedJaxpr(_live(program.jaxpr, [True] * len(program.jaxpr.outvars))[0], program.consts)


def _live(jaxpr: Jaxpr, used: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Return the part of a program that these results need, and whether each argument is needed.

    JAX's own elimination keeps every call of a Triton kernel.
    """
    needed = {var for var, is_used in zip(jaxpr.outvars, used, strict=True) if is_used and isinstance(var, Var)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            eqn, inputs = _live_call(eqn, needed)
            live.append(eqn)
            needed.update(var for var in inputs if isinstance(var, Var))
    return jaxpr.replace(eqns=live[::-1]), [var in needed for var in jaxpr.invars]


def _live_call(eqn, needed: set[Var]) -> tuple[Any, list]:
    """Return an equation, with a program that it only calls reduced to the needed results, and its needed inputs."""
    inner = called(eqn)
    if inner is None or eqn.primitive.name == "scan" or len(inner.jaxpr.invars) != len(eqn.invars):
        return eqn, eqn.invars
    body, inputs = _live(inner.jaxpr, [var in needed for var in eqn.outvars])
    key = next(key for key in _PROGRAMS if key in eqn.params)
    program = ClosedJaxpr(body, inner.consts) if isinstance(eqn.params[key], ClosedJaxpr) else body
    return eqn.replace(params=eqn.params | {key: program}), [
        v for v, wanted in zip(eqn.invars, inputs, strict=True) if wanted
    ]
