"""Recipes of other programs (axolotl, LLaMA-Factory, TRL) by our groups and fields.

Most of their names are aliases beside our fields; this package has the rest.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from jaxglue.settings.config import (
    KEEP,
    Kind,
    KindSettings,
    chosen_groups,
    is_default,
    kind_names,
    plain_fields,
    refusal_of,
)
from jaxglue.settings.dialects.data_sets import with_our_data
from jaxglue.settings.dialects.dataset_info import described_sources
from jaxglue.settings.dialects.left_out import CHANGES, NOTES, REFUSED
from jaxglue.settings.dialects.meaning import use_chats, use_documents, use_wandb
from jaxglue.settings.dialects.rollouts import with_rollouts
from jaxglue.settings.dialects.values import CONVERTERS, Nested, with_objective
from jaxglue.settings.spelling import nearest

_logger = logging.getLogger(__name__)


def translate(recipe: Mapping[str, Any], cls: type, where: str, kinds: Mapping[str, str]) -> Nested:
    """Return the values of another program's flat recipe by our groups and fields, those of groups one level down.

    What the program does where its recipe says nothing is translated, too: all weights are trained, documents are not
    packed. Settings in `NOTES` are left out, and listed in a warning.

    Args:
        recipe: of the other program.
        cls: class of the configuration.
        where: begins errors.
        kinds: names of kinds, which win over the recipe's, by the field that names them.

    Raises:
        ValueError: names all the settings that are not known, or whose values are not.
    """
    values: Nested = {}
    unknown, wrong, left_out = [], list[str](), dict[str, list[str]]()
    ours = with_rollouts(recipe, where)
    for step in (described_sources, with_our_data, with_objective):
        try:
            ours = step(ours, where)
        except ValueError as error:
            wrong.append(str(error).removeprefix(where))
    kinds = _kinds(cls, ours, kinds)
    chosen = chosen_groups(cls, kinds)
    places = dict(_places(chosen))
    for key, value in {**_method(recipe), **ours}.items():
        try:
            if key in CONVERTERS:
                _merge(values, CONVERTERS[key](value))
            elif key not in places and (refusal := refusal_of(chosen, key, kinds)):
                if not _is_default(chosen, key, value):
                    wrong.append(refusal)
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
    use_wandb(recipe, values)
    notes = [note for note in (use_documents(recipe, values), use_chats(recipe, values)) if note]
    if lines := [*notes, *_left_out(left_out)]:
        _logger.warning("%s%s", where, "".join(f"\n  - {line}" for line in lines))
    return values


def _left_out(reasons: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield a line for each reason with its settings, those that change the result first."""
    for reason in sorted(reasons, key=lambda reason: (reason not in CHANGES, reason == "off")):
        change = "left out, and the result may differ" if reason in CHANGES else "left out"
        yield f"{change}: {', '.join(reasons[reason])} ({reason})"


def _kinds(cls: type, recipe: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the names of kinds in a recipe, or those that win over them, by field; bad values are read later."""
    reward = {"objective": "reward"} if recipe.get("reward_model") is True else {}
    named = {
        name: recipe[key] for name, kind in kind_names(cls).items() for key in (name, *kind.aliases) if key in recipe
    }
    return {**reward, **named, **chosen}


def _is_default(chosen: Mapping[str, type], key: str, value: Any) -> bool:
    """Tell whether a setting of kinds that are not chosen has a default of theirs."""
    return any(is_default(group, key, value) for group in chosen.values() if issubclass(group, KindSettings))


def _places(chosen: Mapping[str, type]) -> Iterator[tuple[str, tuple[str, str, Kind]]]:
    """Yield the names of every group's fields, each with its group, field and declaration."""
    for group, members in chosen.items():
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
