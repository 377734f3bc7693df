"""Text forms of a setting that may differ between layers.

One for all layers (`full`), counts in layer order (`10 x full + 26 x dots`), later ones' layers spread evenly among
the first's (`30 x full & 6 x dots`), or repeated groups (`8 x [1 x full + 3 x dots]`).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations

AUTO = "auto"
"""The fastest settings that fit in memory, as `Planner.choose` finds them."""
_DEEPEST = 64
"""Groups inside each other."""
_MOST = 10_000
"""Above the layers of every model."""
_COUNTED = re.compile(r"(\d+) ?x (.+)", re.DOTALL)


def interleave[Item](first: Item, second: Item, layers: int, count: int) -> tuple[Item, ...]:
    """Spread `count` layers of the second setting evenly among those of the first, ending with one of them."""
    return tuple(second if (i + 1) * count // layers > i * count // layers else first for i in range(layers))


def spread[Item](parts: Sequence[tuple[Item, int]]) -> tuple[Item, ...]:
    """Spread the layers of all settings but the first among the first's, those of the third among the second's, …"""
    (first, count), *others = parts
    if not others:
        return (first,) * count
    later = iter(spread(others))
    is_later = interleave(False, True, sum(n for _, n in parts), sum(n for _, n in others))
    return tuple(next(later) if other else first for other in is_later)


@dataclass(frozen=True, kw_only=True)
class LayerSettings[Item]:
    """Reader and writer of one setting for each layer."""

    flag: str
    """The setting's name in messages."""
    item: str
    """Placeholder of a value after its count in messages, such as POLICY."""
    parse: Callable[[str], Item]
    format: Callable[[Item], str] = str

    def read(self, text: str, layers: int) -> tuple[Item, ...]:
        """Return one setting for each layer.

        Raises:
            ValueError: malformed text, or counts that do not sum to the number of layers.
        """
        if not self._is_counted(text):
            return (self.parse(text),) * layers
        items = self._sequence(text)
        if len(items) != layers:
            raise ValueError(f"{self.flag} {text!r:.200} is for {len(items)} layers, the model has {layers}")
        return items

    def check(self, text: str) -> None:
        """Raise ValueError for text that is neither `auto` nor well formed."""
        if text != AUTO:
            self._sequence(text) if self._is_counted(text) else self.parse(text)

    def write(self, items: Sequence[Item]) -> str:
        """Format settings so that `read` reads them."""
        if len(set(items)) == 1:
            return self.format(items[0])
        parts = list(self._parts(items))
        if len(parts) == 1 and 2 < len(set(items)) > parts[0].count(" + "):
            return parts[0]  # one short group
        return self._spread_text(items) or " + ".join(parts)

    def _is_counted(self, text: str) -> bool:
        return len(_split(text, "+")) > 1 or len(_split(text, "&")) > 1 or _COUNTED.fullmatch(text.strip()) is not None

    def _sequence(self, text: str) -> tuple[Item, ...]:
        separator = "&" if len(_split(text, "&")) > 1 else "+"
        parts = [self._counted(part, text) for part in _split(text, separator)]
        if sum(count * len(items) for count, items in parts) > _MOST:
            raise ValueError(f"{self.flag} {text!r:.100} is for more than {_MOST:,} layers")
        if separator == "+":
            return tuple(item for count, items in parts for _ in range(count) for item in items)
        if len({items for _, items in parts}) < len(parts) or any(len(items) > 1 for _, items in parts):
            raise ValueError(
                f"{self.flag} {text!r:.200} must spread one {self.item.lower()}'s layers among another's: "
                f"COUNT x {self.item} & COUNT x {self.item}"
            )
        return spread([(item, count) for count, (item,) in parts])

    def _counted(self, part: str, text: str) -> tuple[int, tuple[Item, ...]]:
        if (match := _COUNTED.fullmatch(part)) is None:
            raise ValueError(f"{self.flag} {text!r:.200}: {part!r:.200} must be COUNT x {self.item}")
        count, rest = int(match[1][:9]), match[2].strip()
        grouped = rest.startswith("[") and rest.endswith("]")
        if grouped and rest.count("[") > _DEEPEST:
            raise ValueError(f"{self.flag} {text!r:.200}: groups nest more than {_DEEPEST} levels deep")
        return count, self._sequence(rest[1:-1]) if grouped else (self.parse(rest),)

    def _spread_text(self, items: Sequence[Item]) -> str | None:
        kinds = dict.fromkeys(items)
        if not 2 <= len(kinds) <= 3 or len(list(groupby(items))) == len(kinds):
            return None
        for order in permutations(kinds):
            parts = [(item, list(items).count(item)) for item in order]
            if spread(parts) == tuple(items):
                return " & ".join(f"{count} x {self.format(item)}" for item, count in parts)
        return None

    def _parts(self, items: Sequence[Item]) -> Iterator[str]:
        """Yield runs of equal layers, and groups where their repetitions are longer."""
        while items:
            length, part = _repetitions(items, 1), f"{_repetitions(items, 1)} x {self.format(items[0])}"
            for size in range(2, len(items) // 2 + 1):
                count = _repetitions(items, size)
                if count > 1 and count * size > length and len(set(items[:size])) > 1:
                    length, part = count * size, f"{count} x [{' + '.join(self._parts(items[:size]))}]"
            yield part
            items = items[length:]


def _repetitions(items: Sequence, size: int) -> int:
    """Return how often the first `size` items come again and again, themselves included."""
    count = 1
    while items[count * size : (count + 1) * size] == items[:size]:
        count += 1
    return count


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == separator and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
