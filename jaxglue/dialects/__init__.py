"""Recipes of other programs (axolotl, LLaMA-Factory, TRL) by our groups and fields.

Most of their names are aliases beside our fields; this package has the rest.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from jaxglue.config import KEEP, Kind, groups, plain_fields
from jaxglue.dialects.data_sets import with_our_data
from jaxglue.dialects.left_out import NOTES, REFUSED
from jaxglue.dialects.values import CONVERTERS, Nested, with_objective
from jaxglue.spelling import nearest

_logger = logging.getLogger(__name__)


def translate(recipe: Mapping[str, Any], cls: type, where: str) -> Nested:
    """Return the values of another program's flat recipe by our groups and fields, those of groups one level down.

    Settings in `NOTES` are named in a warning and left out.

    Raises:
        ValueError: names all the settings that are not known, or whose values are not.
    """
    places = dict(_places(cls))
    values: Nested = {}
    unknown, wrong = [], []
    left_out: dict[str, list[str]] = {}
    for key, value in {**_method(recipe), **with_objective(with_our_data(recipe, where), where)}.items():
        try:
            if key in CONVERTERS:
                _merge(values, CONVERTERS[key](value))
            elif key in places:
                group, field, kind = places[key]
                if (read := kind.from_alias(key, value)) is not KEEP:
                    _merge(values, {group: {field: kind.read(read)}})
            elif key in NOTES:
                left_out.setdefault(NOTES[key], []).append(key)
            elif value is False or value is None or value in ("", [], {}):
                left_out.setdefault("off", []).append(key)
            elif key in REFUSED:
                unknown.append(f"{key} ({REFUSED[key]})")
            else:
                unknown.append(f"{key}{nearest(key, places)}")
        except ValueError as error:
            wrong.append(f"{key}: {error}")
        except (TypeError, AttributeError):
            wrong.append(f"{key}: a value of another type is expected, got {value!r:.100}")
    if unknown:
        wrong.append(f"settings that jaxglue does not know: {', '.join(unknown)}. Remove them to go on")
    if wrong:
        raise ValueError(where + "; ".join(wrong))
    if left_out:
        notes = (f"{', '.join(names)} ({reason})" for reason, names in left_out.items())
        _logger.warning("%sleft out: %s", where, "; ".join(notes))
    return values


def _places(cls: type) -> Iterator[tuple[str, tuple[str, str, Kind]]]:
    """Yield the names of every group's fields, each with its group, field and declaration."""
    for group, members in groups(cls).items():
        for field, kind in plain_fields(members).values():
            for name in (field.name, *kind.aliases):
                yield name, (group, field.name, kind)


def _merge(values: Nested, more: Nested) -> None:
    for group, fields in more.items():
        table = values.setdefault(group, {})
        if twice := [name for name in fields if name in table and table[name] != fields[name]]:
            raise ValueError(f"{', '.join(twice)} is given twice, by this name and another: leave one out")
        table.update(fields)


def _method(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the training method that another program takes where its recipe names none: full, but in LLaMA-Factory."""
    full = "base_model" in recipe or "model_name_or_path" in recipe
    named = {"adapter", "finetuning_type", "use_peft", "stage", "method", "full_finetuning"} & recipe.keys()
    return {"method": "full"} if full and not named else {}
