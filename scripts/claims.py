"""Bind the numbers of pages to the result files that they come from.

    python scripts/claims.py docs/measured/attention.md

For each table row or paragraph with numbers, `docs/measured/claims.toml` says where each of them comes from, in order:
a path into a file of `benchmarks/results/`, or `-` for settings, versions and data sheets; `["-"]` alone stands for a
block of these. A path's steps are keys, positions, or `key=value` of a list's item. Paths and numbers are joined by
+ − × ÷, and a path that begins with a dot continues from the place of the one before it:
`sft_step.json > results > row=qwen3-8b, engine=ours > tokens ÷ .ms × 1000`. A path to a text goes on with words of
it that have the number: `… > plan : 26 x host`. The command proposes missing entries.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = ROOT / "docs" / "measured" / "claims.toml"
RESULTS = ROOT / "benchmarks" / "results"
SETTING = "-"
BOUND = "README.md", "docs/index.md", "docs/measured/"
"""Pages all of whose numbers are bound, of others those of measurements."""
PASSED_OVER = {
    "profile",
    "ms_all",
    "warm_up_s",
    "launches",
    "kernels",
    "steps",
    "process_s",
    "date",
    "commit",
    "versions",
    "settings",
}
"""Keys in which a number of a page is seldom meant."""
NUMBER = re.compile(r"(?<![\w.,/^-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w^]|\.\d|-[a-z]*\d)")
_CODE_OR_LINK = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->|https?://\S+", re.S)
_DATE = re.compile(r"\d{1,2} (?:October|November|December)(?: \d{4})?|\d{4}-\d\d-\d\d|\bcommit [0-9a-f]{7,}")
_OPERATOR = re.compile(r" ([+−×÷]) (?=[\d.]|\w+\.json )")
_UNIT = re.compile(
    r"\d\s(?:ms|µs|tokens/s|pairs/s|TFLOP/s|TB/s|GB/s|MB/s|nats|seconds)\b|\d ×(?! ?[\w`])"
    r"|\d times (?:as (?:fast|many)|one)|\dk/s|\d%"
)
_UNIT_OF_TABLE = re.compile(r"\bms\b(?!-swift)|µs|tokens/s|GiB|pairs/s|seconds|\bKL\b|held-out loss|TFLOP/s|predicted")


@dataclass(frozen=True)
class Block:
    """A table row or paragraph of a page: its section, its name, its numbers as written, and if it tells a measurement.

    One that does has a number with a unit of speed or time, or %, or stands in a table whose header has one.
    """

    section: str
    name: str
    numbers: tuple[str, ...]
    measured: bool
    text: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page's text that show numbers."""
    text = _CODE_OR_LINK.sub(lambda match: re.sub(r"\d|```.*", "", match[0]) if match[0].startswith("`") else "]", text)
    section, header, named = "", "", set()
    for part in re.split(r"\n\s*\n|\n(?=\|)|\n(?=\s*[-*] )|\n(?=#)", _DATE.sub("", text)):
        if heading := re.match(r"#+ (.*)\n?", part.strip()):
            section, part = heading[1].strip(), part.strip()[heading.end() :]
        row = part.lstrip().startswith("|")
        header = (header or part) if row else ""
        if not (numbers := tuple(NUMBER.findall(part))):
            continue
        name = base = _name(part)
        while (section, name) in named:
            name = f"{base} #{int(name.rpartition('#')[2]) + 1 if '#' in name[len(base) :] else 2}"
        named.add((section, name))
        yield Block(
            section,
            name,
            numbers,
            bool(_UNIT.search(part) or (row and _UNIT_OF_TABLE.search(header))),
            f"{header} {part}",
        )


def _name(part: str) -> str:
    """Return a row's cells, or a paragraph's words, before its first number."""
    words = NUMBER.split(part, maxsplit=1)[0].replace("*", "").replace("`", "").replace("]", "").replace("[", "")
    cells = [cell.strip() for cell in words.split("|") if cell.strip(" –·(~≤")]
    text = " | ".join(cells) if part.lstrip().startswith("|") else " ".join(words.split()[:8])
    return text.strip(" -") or "…"


def evaluate(expression: str) -> float:
    """Return the value of a claim's expression; × and ÷ come before + and −."""
    with suppress(KeyError):  # of keys with such signs, too
        return _number(_follow(expression))
    item, sums, operator = None, [0.0], "+"
    for token in _OPERATOR.split(expression):
        if token in "+−×÷":
            operator = token
            continue
        if re.fullmatch(r"[\d.]+(?:e-?\d+)?", token):
            value = float(token)
        else:
            path, _, key = token.rpartition(" > ") if token[0] != "." else ("", "", token[1:])
            item = _follow(path) if path else item
            value = _number(_step(item, key))
        if operator in "+−":
            sums.append(value if operator == "+" else -value)
        else:
            sums[-1] *= value if operator == "×" else 1 / value
    return sum(sums)


def _follow(path: str):
    """Return the value at a path, which begins with a file."""
    file, *steps = path.split(" > ")
    return reduce(_step, steps, _load(file))


@cache
def _load(file: str):
    if not (RESULTS / file).is_file():
        raise KeyError(file)
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


def agrees(shown: str, source: str) -> bool:
    """Return whether a claim's source has the shown number, or the words after a colon with it."""
    path, _, words = source.partition(" : ")
    if words:
        return shown in words and words in str(_follow(path))
    return not differs(shown, evaluate(source))


def read_claims() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the claims: page → section → block → a source for each number."""
    return tomllib.loads(CLAIMS.read_text(encoding="utf-8"))


def problems(page: str, text: str, claims: dict[str, dict[str, list[str]]], *, all_numbers: bool) -> list[str]:
    """Return what is wrong: numbers without a claim or with another value, claims without their block.

    All numbers need one, or those of measured blocks.
    """
    wrong, seen = [], set()
    for block in blocks(text):
        sources = claims.get(block.section, {}).get(block.name)
        seen.add((block.section, block.name))
        if sources == [SETTING] or (sources is None and not all_numbers and not block.measured):
            continue
        place = f"{page}, {block.section}: {block.name}"
        if sources is None or len(sources) != len(block.numbers):
            wrong.append(f"{place}: {len(block.numbers)} numbers, {len(sources or [])} sources")
            continue
        wrong += [
            f"{place}: {shown} is not that of {source}{'' if ' : ' in source else f', {evaluate(source):.6g}'}"
            for shown, source in zip(block.numbers, sources, strict=True)
            if source != SETTING and not agrees(shown, source)
        ]
    listed = {(section, name) for section, entries in claims.items() for name in entries}
    return wrong + [f"{page} lacks {section}: {name}" for section, name in sorted(listed - seen)]


def leaves(value, path: str) -> Iterator[tuple[float, str]]:
    """Yield every number of a file with its path, items of lists by the fewest keys that tell them apart."""
    if isinstance(value, dict):
        for key, child in value.items():
            if key in PASSED_OVER:
                continue
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
    if len(items) == 1:
        return "0"
    for key, value in item.items():
        if isinstance(value, str | int) and not isinstance(value, bool):
            fewer = [other for other in rest if str(other.get(key)) == str(value)]
            if len(fewer) < len(rest):
                pairs, rest = [*pairs, (key, str(value))], fewer
            if len(rest) == 1:
                return ", ".join(f"{key}={value}" for key, value in pairs)
    return str(index)


def propose(block: Block, pool: list[tuple[float, str]]) -> list[str]:
    """Return the likeliest source of each number, ? without any.

    Words that a path shares with the block decide between several. Numbers of few digits are those of an item that
    another number of the block is from.
    """
    words = {*re.findall(r"[\w.]+", f"{block.text} {block.section}".lower())}
    fits = [_fits(number, words, pool) for number in block.numbers]
    sure = [len(re.sub(r"\D", "", number).strip("0")) > 2 for number in block.numbers]
    items = {max(each)[1].rpartition(" > ")[0] for each, is_sure in zip(fits, sure, strict=True) if each and is_sure}
    sources = []
    for number, each, is_sure in zip(block.numbers, fits, sure, strict=True):
        each = each if is_sure else [(score, path) for score, path in each if path.rpartition(" > ")[0] in items]
        whole = int(number.replace(",", "")) if re.fullmatch(r"[\d,]+", number) else None
        power_of_two = whole is not None and whole & (whole - 1) == 0  # tokens, ranks, sizes of heads
        sources.append(SETTING if power_of_two else max(each)[1] if each else "?")
    return sources


def _fits(shown: str, words: set[str], pool: list[tuple[float, str]]) -> list[tuple[float, str]]:
    fits = []
    for value, path in pool:
        for factor, text in ((1.0, ""), (100.0, " × 100"), (1e3, " × 1000"), (1e-3, " ÷ 1000"), (1e-9, " ÷ 1e9")):
            if not differs(shown, value * factor):
                common = len(words & {*re.findall(r"[\w.]+", path.lower())})
                fits.append((common - 0.5 * bool(text) - 0.002 * len(path), path + text))
    return fits


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
        section, everything = None, name.startswith(BOUND)
        for block in blocks(text):
            if block.name in claims.get(name, {}).get(block.section, {}) or not (everything or block.measured):
                continue
            if section != block.section:
                section = block.section
                print(f"\n[{json.dumps(name)}.{json.dumps(section, ensure_ascii=False)}]")
            print(f"{json.dumps(block.name, ensure_ascii=False)} = [")
            for number, source in zip(block.numbers, propose(block, pool), strict=True):
                print(f"  {json.dumps(source, ensure_ascii=False)},  # {number}")
            print("]")


if __name__ == "__main__":
    main()
