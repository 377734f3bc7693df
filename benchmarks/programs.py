"""Compute FLOPs and bytes of every kernel in a profile, from the HLO programs in the trace.

A trace holds the optimized HLO of each module that ran. `ProfileData` does not expose it, so its fields are read from
the protocol buffer (XLA's xplane.proto: XSpace.planes = 1, XPlane.name = 2, .event_metadata = 4, XEventMetadata.name =
2, .stats = 5, XStat.bytes_value = 6; hlo.proto: HloProto.hlo_module = 1). Events inside a CUDA graph do not name their
operation: XLA's own kernels carry its name; those of libraries and custom calls are matched by the program's order.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jax._src.lib import xla_client

_ITEM = {"pred": 1, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5, "bf16": 2}
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)"?([\d",]*)')
_SLICES = ("slice", "dynamic-slice", "gather")
_CALL = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*custom_call_target="([^"]*)', re.MULTILINE)
_CALLED = re.compile(r"calls=%?([\w.\-]+)")


class Work(NamedTuple):
    """FLOPs and bytes of one operation."""

    flops: float
    """FLOPs of its matmuls."""
    bytes: float
    """Bytes of its operands and results, each read or written once; sliced operands count their slices."""
    shape: str
    """Type of its first result."""


UNKNOWN = Work(0.0, 0.0, "")


class Program:
    """Operations of one program by kernel name."""

    def __init__(self, text: str):
        found = operations(text)
        self._named = {name.replace(".", "_"): work for name, work in found.items()}
        self._calls: dict[bool, list[Work]] = {True: [], False: []}  # of libraries, and all others
        for name, target in _CALL.findall(text):
            self._calls[target.startswith("__cublas")].append(found.get(name, UNKNOWN))

    def work(self, kernels: list[str]) -> list[Work]:
        """Return the work of each kernel that ran, in order; `UNKNOWN` without a match."""
        found = [self._named.get(kernel, UNKNOWN) for kernel in kernels]
        unnamed = [index for index, kernel in enumerate(kernels) if kernel not in self._named]
        for library, calls in self._calls.items():
            ran = [index for index in unnamed if _is_matmul(kernels[index]) == library and not _adds_up(kernels[index])]
            if calls and _repeats([kernels[index] for index in ran], len(calls)):
                for place, index in enumerate(ran):
                    found[index] = calls[place % len(calls)]
        return found


def _is_matmul(kernel: str) -> bool:
    """Return whether a kernel's name is a matmul library's."""
    return any(word in kernel for word in ("nvjet", "gemm", "xmma", "cutlass", "cublas"))


def _adds_up(kernel: str) -> bool:
    """Return whether a kernel reduces the split-K partial sums of the one before it."""
    return "splitKreduce" in kernel


def _repeats(kernels: list[str], count: int) -> bool:
    """Return whether the kernels repeat with period `count`, as repeated programs and loops do."""
    return len(kernels) % count == 0 and all(name == kernels[i % count] for i, name in enumerate(kernels))


def read_programs(trace: Path) -> dict[int, Program]:
    """Read every program of a trace file (*.xplane.pb), by id."""
    return {number: Program(text) for number, text in _programs(memoryview(trace.read_bytes()))}


def operations(text: str) -> dict[str, Work]:
    """Compute the work of every operation of a program in HLO text."""
    shapes: dict[str, str] = {}
    flops: dict[str, float] = {}  # by computation, as what follows
    reads: dict[str, dict[int, float]] = {}
    parameters: dict[str, int] = {}
    found, computation = {}, ""
    for line in text.splitlines():
        if line.rstrip().endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            reads[computation], parameters = {}, {}
        elif match := _INSTRUCTION.match(line):
            name, shape, opcode, rest = match.groups()
            shapes[name] = shape
            operands = [operand for operand in re.findall(r"%?([\w.\-]+)", _arguments(rest)) if operand in shapes]
            called = _CALLED.search(rest)
            own = flops.get(called[1], 0.0) if called else _matmul(shape, opcode, operands, rest, shapes)
            flops[computation] = flops.get(computation, 0.0) + own
            if opcode == "parameter":
                parameters[name] = int(_arguments(rest))
            elif opcode == "bitcast" and operands[0] in parameters:
                parameters[name] = parameters[operands[0]]
            for operand in operands if opcode != "bitcast" else ():
                if (index := parameters.get(operand)) is not None:
                    read = _size(shape if opcode in _SLICES else shapes[operand])
                    reads[computation][index] = reads[computation].get(index, 0.0) + read
            inner = reads.get(called[1], {}) if called else {}
            sizes = [_size(shapes[operand]) for operand in operands]
            size = _size(shape) + sum(min(size, inner.get(index, size)) for index, size in enumerate(sizes))
            found[name] = Work(own, size, shape.split("{")[0].strip("("))
    return found


def _arguments(rest: str) -> str:
    """Return the operands: the text before the closing parenthesis."""
    depth = 1
    for index, character in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return rest[:index]
    return rest


def _matmul(shape: str, opcode: str, operands: list[str], rest: str, shapes: dict[str, str]) -> float:
    contracted = _CONTRACTED.search(rest)
    if not (opcode == "dot" or "__cublas" in rest) or not contracted or not operands:
        return 0.0
    left = _dimensions(shapes[operands[0]])[0][1]
    dims = [int(dim) for dim in re.findall(r"\d+", contracted[1])]
    return 2.0 * math.prod(_dimensions(shape)[0][1]) * math.prod(left[dim] for dim in dims)


def _dimensions(shape: str) -> list[tuple[str, list[int]]]:
    """Return (dtype, dimensions) of every array of a shape."""
    return [(dtype, [int(dim) for dim in dims.split(",") if dim]) for dtype, dims in _SHAPE.findall(shape)]


def _size(shape: str) -> float:
    return sum(_item(dtype) * math.prod(dims) for dtype, dims in _dimensions(shape))


def _item(dtype: str) -> float:
    if dtype in _ITEM:
        return _ITEM[dtype]
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0.0


def _programs(space: memoryview) -> Iterator[tuple[int, str]]:
    for plane in (value for field, value in _fields(space) if field == 1):
        fields = list(_fields(plane))
        if (2, b"/host:metadata") not in ((field, bytes(value)) for field, value in fields if field == 2):
            continue
        for metadata in (dict(_fields(entry))[2] for field, entry in fields if field == 4):
            number = re.search(rb"\((\d+)\)$", dict(_fields(metadata)).get(2, b""))
            for stat in (dict(_fields(value)) for field, value in _fields(metadata) if field == 5):
                if 6 in stat and number:
                    module = bytes(dict(_fields(stat[6]))[1])
                    yield int(number[1]), xla_client.XlaComputation(module).as_hlo_text()


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (field number, value) of a protocol buffer's length-delimited fields; skip others."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 2:
            length, at = _varint(message, at)
            yield key >> 3, message[at : at + length]
            at += length
        elif kind == 0:
            at = _varint(message, at)[1]
        else:
            at += {1: 8, 5: 4}[kind]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at
