"""Write the tables of docs/from_other_tools.md from the declarations of flags and their aliases.

python scripts/alias_tables.py
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from jaxglue.settings.config import Kind, every_field
from jaxglue.settings.dialects import NOTES, REFUSED
from jaxglue.training.config import TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "from_other_tools.md"
_MARK = "<!-- tables: python scripts/alias_tables.py -->\n"


def render(page: str) -> str:
    """Return the page with its tables, everything after the mark, made anew."""
    text, mark, _ = page.partition(_MARK)
    return (
        f"{text}{mark}\n## Their settings and ours\n\n{_aliases()}\n\n## Settings without a counterpart\n\n{_notes()}\n"
    )


def _aliases() -> str:
    rows = [
        (", ".join(_names(kind)), f"`--{field.name.replace('_', '-')}`")
        for _, field, kind in every_field(TrainConfig)
        if kind.aliases
    ]
    return _table(("theirs", "ours"), rows)


def _names(kind: Kind) -> Iterator[str]:
    for name, own in kind.aliases.items():
        values = own or kind.synonyms
        if not values:
            yield f"`{name}`"
        else:
            yield f"`{name}` ({', '.join(f'{_yaml(value)} → {_yaml(ours)}' for value, ours in values.items())})"


def _yaml(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_yaml, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _notes() -> str:
    settings: dict[str, list[str]] = defaultdict(list)
    for name, note in (NOTES | REFUSED).items():
        settings[note].append(f"`{name}`")
    return _table(("theirs", "here"), [(", ".join(names), note) for note, names in settings.items()])


def _table(header: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [header, ("---", "---"), *((left.replace("|", r"\|"), right.replace("|", r"\|")) for left, right in rows)]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
