"""A few PTX instructions in NumPy, for assembly inside kernels that Triton's interpreter does not run."""

import re
from collections.abc import Sequence

import ml_dtypes
import numpy as np


def run_assembly(text: str, inputs: Sequence[int], results: int) -> list[int]:
    """Return the results $0, $1, … of instructions on inputs, which are numbered after them, of 32 or 16 bits."""
    registers = {f"${results + i}": value for i, value in enumerate(inputs)}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in re.split(r"[;\n]", text.strip()):
        if (line := line.strip()) in ("", "{", "}") or line.startswith((".reg", "{.reg")):
            continue
        if pair := re.fullmatch(r"mov\.b32 \{(.+), (.+)\}, (.+)", line):
            low, high, word = pair.groups()
            registers |= {low: value(word) & 0xFFFF, high: value(word) >> 16}
            continue
        if pair := re.fullmatch(r"mov\.b32 (.+), \{(.+), (.+)\}", line):
            word, low, high = pair.groups()
            registers[word] = value(high) << 16 | value(low)
            continue
        name, _, operands = line.partition(" ")
        target, *sources = (part.strip() for part in operands.split(","))
        registers[target] = _INSTRUCTIONS[name](*map(value, sources)) & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(results)]


def _permute(a: int, b: int, selector: int) -> int:
    """Choose bytes of b and a by four bits each, of which the last asks for the byte's sign in all its bits."""
    source, out = (b << 32 | a).to_bytes(8, "little"), 0
    for i in range(4):
        bits = selector >> 4 * i & 15
        byte = source[bits & 7]
        out |= (byte if bits < 8 else 255 * (byte >> 7)) << 8 * i
    return out


def _logic(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


def halves(word: int) -> np.ndarray:
    """Return the two bfloat16 values of a word, the low one first."""
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(ml_dtypes.bfloat16)


def _multiply(a: int, b: int) -> int:
    low, high = (halves(a).astype(np.float32) * halves(b).astype(np.float32)).astype(ml_dtypes.bfloat16).view(np.uint16)
    return int(low) | int(high) << 16


_INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "shr.b32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "lop3.b32": _logic,
    "prmt.b32": _permute,
    "mul.lo.u32": lambda a, b: a * b,
    "mul.rn.bf16x2": _multiply,
}


def matmuls_left_running(text: str) -> int:
    """Count the loops of a kernel that repeat while a matmul may still read its operand in registers."""
    lines, count = [line.strip() for line in text.splitlines()], 0
    labels = {label[1]: i for i, line in enumerate(lines) if (label := re.match(r"(\$\w+):", line))}
    for end, line in enumerate(lines):
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if branch and (start := labels.get(branch[1], end)) < end:
            steps = [step for step in lines[start:end] if step.startswith(("wgmma.mma", "wgmma.wait"))]
            decoded = any(re.search(r"\}, \{", step) for step in steps)
            count += decoded and not re.search(r"wait_group\S* 0", steps[-1])
    return count
