"""Bind the numbers of pages to the result files that they come from.

    python scripts/claims.py docs/measured/attention.md

For each table row or paragraph with numbers, `docs/measured/claims.toml` says where each of them comes from, in order:
a path into a file of `benchmarks/results/`, or `-` for settings, versions and data sheets; `["-"]` alone stands for a
block of these. A path's steps are keys, positions, or `key=value` of a list's item. Paths and numbers are joined by
+ − × ÷, and a path that begins with a dot continues from the place of the one before it:
`sft_step.json > results > row=qwen3-8b, engine=ours > tokens ÷ .ms × 1000`. The command proposes missing entries.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = ROOT / "docs" / "measured" / "claims.toml"
RESULTS = ROOT / "benchmarks" / "results"
SETTING = "-"
NUMBER = re.compile(r"(?<![\w.,/^-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w^]|\.\d|-[a-z]*\d)")
_CODE_OR_LINK = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->|https?://\S+", re.S)
_DATE = re.compile(r"\d{1,2} (?:October|November|December)(?: \d{4})?|\d{4}-\d\d-\d\d|\bcommit [0-9a-f]{7,}")
_OPERATORS = {"+": float.__add__, "−": float.__sub__, "×": float.__mul__, "÷": float.__truediv__}


@dataclass(frozen=True)
class Block:
    """A table row or paragraph of a page, with its name and the numbers that it shows, as written."""

    section: str
    name: str
    numbers: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that show numbers."""
    text = _CODE_OR_LINK.sub(lambda match: "`" if match[0].startswith("`") else "]", page.read_text(encoding="utf-8"))
    section, named = page.stem, set()
    for part in re.split(r"\n\s*\n|\n(?=\|)|\n(?=\s*[-*] )|\n(?=#)", _DATE.sub("", text)):
        if heading := re.match(r"#+ (.*)\n?", part.strip()):
            section, part = heading[1].strip(), part.strip()[heading.end() :]
        numbers = tuple(NUMBER.findall(part))
        if not numbers:
            continue
        name = base = _name(part)
        while (section, name) in named:
            name = f"{base} #{int(name.rpartition('#')[2]) + 1 if '#' in name[len(base) :] else 2}"
        named.add((section, name))
        yield Block(section, name, numbers)


def _name(part: str) -> str:
    """Return a row's cells, or a paragraph's words, before its first number."""
    words = NUMBER.split(part, maxsplit=1)[0].replace("*", "").replace("`", "").replace("]", "").replace("[", "")
    cells = [cell.strip() for cell in words.split("|") if cell.strip(" –·(~≤")]
    text = " | ".join(cells) if part.lstrip().startswith("|") else " ".join(words.split()[:8])
    return text.strip(" -") or "…"


def evaluate(expression: str) -> float:
    """Return the value of a claim's expression."""
    place: list = []
    operator, total = "+", 0.0
    for token in re.split(r" ([+−×÷]) ", expression):
        if token in _OPERATORS:
            operator = token
            continue
        if re.fullmatch(r"[\d.]+(?:e-?\d+)?", token):
            value = float(token)
        elif token.startswith("."):
            value = _number(_step(place[-1], token[1:]))
        else:
            file, *steps = token.split(" > ")
            place = [_load(file)]
            for step in steps:
                place.append(_step(place[-1], step))
            value = _number(place.pop())
        total = _OPERATORS[operator](total, value)
    return total


@cache
def _load(file: str):
    return json.loads((RESULTS / file).read_text(encoding="utf-8"), object_hook=_named_columns)


def _named_columns(item: dict):
    """Return the rows of a table with its columns' names as dictionaries."""
    if {"columns", "rows"} <= item.keys() and all(isinstance(row, list) for row in item["rows"]):
        return item | {"rows": [dict(zip(item["columns"], row, strict=False)) for row in item["rows"]]}
    return item


def _step(value, step: str):
    if isinstance(value, dict) and step in value:
        return value[step]
    if isinstance(value, list) and re.fullmatch(r"-?\d+", step):
        return value[int(step)]
    if isinstance(value, list) and "=" in step:
        wanted = [pair.split("=", 1) for pair in re.split(r", (?=[^,=]+=)", step)]
        fits = [item for item in value if isinstance(item, dict) and all(str(item.get(k)) == v for k, v in wanted)]
        if len(fits) == 1:
            return fits[0]
        raise KeyError(f"{len(fits)} items have {step}")
    raise KeyError(step)


def _number(value) -> float:
    """Return a number, also of texts such as 17.5% or 2.4e-4."""
    return float(str(value).rstrip("%× ")) if not isinstance(value, list) else float(len(value))


def differs(shown: str, value: float) -> bool:
    """Return whether a value is not the shown one, rounded as that is."""
    mantissa, _, exponent = shown.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(value - float(shown.replace(",", ""))) > unit * 0.5000001


def read_claims() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the claims: page → section → block → a source for each number."""
    return tomllib.loads(CLAIMS.read_text(encoding="utf-8"))


def problems(page: Path, claims: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return what is wrong: numbers without a claim or with another value, claims without their block."""
    wrong, seen = [], set()
    for block in blocks(page):
        sources = claims.get(block.section, {}).get(block.name)
        seen.add((block.section, block.name))
        place = f"{page.name}, {block.section}: {block.name}"
        if sources == [SETTING]:
            continue
        if sources is None or len(sources) != len(block.numbers):
            wrong.append(f"{place}: {len(block.numbers)} numbers, {len(sources or [])} sources")
            continue
        for shown, source in zip(block.numbers, sources, strict=True):
            if source != SETTING and differs(shown, value := evaluate(source)):
                wrong.append(f"{place}: {shown} is {value:.6g} in {source}")
    listed = {(section, name) for section, entries in claims.items() for name in entries}
    return wrong + [f"{page.name} lacks {section}: {name}" for section, name in sorted(listed - seen)]


def leaves(value, path: str) -> Iterator[tuple[float, str]]:
    """Yield every number of a file with its path, items of lists by the fewest keys that tell them apart."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, f"{path} > {key}")
        if isinstance(value.get("ms"), int | float) and isinstance(value.get("tokens"), int | float):
            yield value["tokens"] / value["ms"] * 1e3, f"{path} > tokens ÷ .ms × 1000"
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from leaves(child, f"{path} > {_selector(value, child, index)}")
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            yield _number(value), path
        except ValueError:
            return


def _selector(items: list, item, index: int) -> str:
    if not isinstance(item, dict) or not all(isinstance(each, dict) for each in items):
        return str(index)
    pairs: list[tuple[str, str]] = []
    rest = items
    for key, value in item.items():
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            fewer = [other for other in rest if str(other.get(key)) == str(value)]
            if len(fewer) < len(rest):
                pairs, rest = [*pairs, (key, str(value))], fewer
            if len(rest) == 1:
                return ", ".join(f"{key}={value}" for key, value in pairs)
    return str(index)


def propose(shown: str, words: set[str], pool: list[tuple[float, str]]) -> str:
    """Return the likeliest source of a number, ? without any; words of row and section decide between several."""
    fits = []
    for value, path in pool:
        for factor, text in ((1.0, ""), (100.0, " × 100"), (1e3, " × 1000"), (1e-3, " ÷ 1000"), (1e-9, " ÷ 1e9")):
            if not differs(shown, value * factor):
                common = len(words & {*re.findall(r"[\w.]+", path.lower())})
                fits.append((common - 0.5 * bool(text) - 0.002 * len(path), path + text))
    return max(fits)[1] if fits else "?"


def main() -> None:
    """Print entries for the blocks of pages that have none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--files", nargs="*", help="result files, by default those that the page names")
    args = parser.parse_args()
    claims = read_claims()
    for page in args.pages:
        name = page.resolve().relative_to(ROOT).as_posix()
        text = page.read_text(encoding="utf-8")
        named = {file for file in re.findall(r"\b\w+\.json\b", text) if (RESULTS / file).exists()}
        pool = [leaf for file in args.files or sorted(named) for leaf in leaves(_load(file), file)]
        section = None
        for block in blocks(page):
            if block.name in claims.get(name, {}).get(block.section, {}):
                continue
            if section != block.section:
                section = block.section
                print(f"\n[{json.dumps(name)}.{json.dumps(section, ensure_ascii=False)}]")
            words = {*re.findall(r"[\w.]+", f"{block.name} {section}".lower())}
            print(f"{json.dumps(block.name, ensure_ascii=False)} = [")
            for number in block.numbers:
                print(f"  {json.dumps(propose(number, words, pool), ensure_ascii=False)},  # {number}")
            print("]")


if __name__ == "__main__":
    main()
