"""Recipes of other programs (axolotl, LLaMA-Factory, TRL, torchtune) by our groups and fields.

Most of their names are aliases beside our fields; this package has the rest.
"""

import contextlib
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
    names_in,
    plain_fields,
    refusal_of,
)
from jaxglue.settings.dialects.data_sets import with_our_data
from jaxglue.settings.dialects.dataset_info import described_sources
from jaxglue.settings.dialects.defaults import AXOLOTL, FACTORY_V1, SWIFT, TORCHTUNE, TRL, program_of
from jaxglue.settings.dialects.factory_v1 import with_v1_settings
from jaxglue.settings.dialects.left_out import AS_HERE, CHANGES, HARMLESS, NOTES, REFUSED
from jaxglue.settings.dialects.meaning import (
    use_balance,
    use_betas_of_muon,
    use_chats,
    use_constant_rate,
    use_documents,
    use_images,
    use_no_dropout,
    use_no_share,
    use_pieces,
    use_room,
    use_texts,
    use_tower,
    use_trackers,
    use_whole_distribution,
    use_whole_embedding,
    use_wide_weights,
    use_wider_moments,
)
from jaxglue.settings.dialects.rollouts import with_rollouts
from jaxglue.settings.dialects.swift import with_swift_settings
from jaxglue.settings.dialects.torchtune import with_flat_settings
from jaxglue.settings.dialects.values import CONVERTERS, SUPERVISED, Nested, with_objective, with_one_name
from jaxglue.settings.spelling import nearest

_logger = logging.getLogger(__name__)
NO_FLAGS: Mapping[str, Any] = {}
NO_LINES: Mapping[str, int] = {}
_PREFERENCE = {"beta", "loss_type", "label_smoothing", "precompute_ref_log_probs", "desirable_weight", "rpo_alpha"}
"""Settings by which a recipe of TRL's without an objective is known to be one of preferences."""
_UNKNOWN = "unknown, and by the name no part of what is computed: --strict refuses such settings"
_EVENTS = ("eval_steps", "save_steps", "logging_steps")
"""Steps between events, which transformers takes for shares of a run below 1."""


def translate(
    recipe: Mapping[str, Any],
    cls: type,
    where: str,
    flags: Mapping[str, Any] = NO_FLAGS,
    *,
    strict: bool = False,
    lines: Mapping[str, int] = NO_LINES,
) -> Nested:
    """Return the values of another program's recipe by our groups and fields, those of groups one level down.

    What the program does where its recipe says nothing is translated, too (`defaults.py`): the rank of its adapters,
    its learning rate for the objective, its steps of documents. Settings in `NOTES` are left out, and listed in a
    warning with the defaults that were filled in.

    Args:
        recipe: the file's settings.
        cls: the configuration.
        where: the beginning of errors.
        flags: given beside the recipe, by field; kinds among them win over the recipe's, and decide defaults.
        strict: refuse unknown settings, too, that by their names change nothing that is computed.
        lines: those of the settings in the file, which errors name.

    Raises:
        ValueError: names all the settings that are not known, or whose values are not.
    """
    program = program_of(recipe)
    with _on_lines(where, lines):
        given = _flat(recipe, where)
        values, left_out, wrong = _read(given, cls, where, flags, HARMLESS if not strict else (), lines)
    if "objective" in flags:
        values.setdefault("objective", {})["objective"] = flags["objective"]
    loss = _PREFERENCE & recipe.keys() - ({"loss_type"} if recipe.get("loss_type") in SUPERVISED else set())
    if program is TRL and "objective" not in values.get("objective", {}) and loss:
        wrong.append(
            f"{', '.join(sorted(loss))}: settings of a preference loss, and TRL names it in the command: add "
            "--objective dpo (or kto, orpo, reward, …)"
        )
    if wrong:
        raise ValueError(where + "; ".join(_on_line(text, lines) for text in wrong))
    use_trackers(recipe, values)
    notes = [
        use_documents(given, values, program),
        use_chats(values, program),
        use_texts(values, program),
        use_pieces(recipe, values, program),
        use_room(given, values) if program is not None else None,
        use_no_share(values) if program is not None else None,
        use_whole_distribution(values, program),
        use_tower(recipe, values, program),
        use_images(recipe, program),
        use_whole_embedding(values, program),
        use_balance(recipe),
        use_betas_of_muon(values, program),
        use_wide_weights(values, program),
        use_wider_moments(recipe),
        use_constant_rate(recipe, values, program),
        f"{program.rows} there, and here of 4,096 tokens at most: --seq-len says more"
        if program is not None and program.rows and "seq_len" not in {**values.get("data", {}), **flags}
        else None,
        use_no_dropout(recipe, values, program),
    ]
    told = [*filter(None, notes), *_left_out(left_out)]
    if program is not None and (missing := program.missing(values, flags)):
        told.append(f"left unsaid, and {program.name} has no default for it, so as jaxglue has it: {missing}")
    if program is not None and (filled := list(program.fill(values, chosen_groups(cls, names_in(cls, values))))):
        told.append(f"left unsaid, so as {program.name} {program.version} has it: {', '.join(filled)}")
    if told:
        _logger.warning("%s%s", where, "".join(f"\n  - {line}" for line in told))
    return values


def _flat(recipe: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the recipe with names of its own program's alone by those of others or ours."""
    readers = {
        TORCHTUNE.name: with_flat_settings,
        SWIFT.name: with_swift_settings,
        FACTORY_V1.name: with_v1_settings,
    }
    program = program_of(recipe)
    return recipe if program is None or program.name not in readers else readers[program.name](recipe, where)


def _read(
    recipe: Mapping[str, Any],
    cls: type,
    where: str,
    flags: Mapping[str, Any],
    harmless: tuple[str, ...],
    lines: Mapping[str, int],
) -> tuple[Nested, dict[str, list[str]], list[str]]:
    """Return the translated values, the settings left out by reason, and a text for each that is wrong.

    Unknown settings whose names begin with one of `harmless` are left out, the others wrong.
    """
    values: Nested = {}
    unknown, wrong, left_out = [], list[str](), dict[str, list[str]]()
    ours = with_rollouts(with_one_name(recipe), where, flags.get("objective"))
    for step in (described_sources, with_our_data, with_objective):
        try:
            ours = step(ours, where)
        except ValueError as error:
            wrong.append(str(error).removeprefix(where))
    kinds = {**_kinds(cls, ours), **flags}
    chosen = chosen_groups(cls, kinds)
    places = dict(_places(chosen))
    for key, value in {**_method(recipe), **ours}.items():
        try:
            if key in _EVENTS and isinstance(value, float) and value < 1:
                left_out.setdefault("shares of all steps: --eval-every and --save-every count steps", []).append(key)
            elif key in CONVERTERS:
                _merge(values, CONVERTERS[key](value))
            elif key not in places and (refusal := refusal_of(chosen, key, kinds)):
                if not _is_default(chosen, key, value):
                    wrong.append(f"{key}: {refusal}")
            elif key in places:
                group, field, kind = places[key]
                if (read := kind.from_alias(key, value)) is not KEEP:
                    _merge(values, {group: {field: kind.read(read)}})
            elif value in AS_HERE.get(key, ()):
                continue
            elif key in NOTES:
                left_out.setdefault(NOTES[key], []).append(key)
            elif value is False or value is None or value in ("", [], {}):
                left_out.setdefault("off", []).append(key)
            elif key in REFUSED:
                wrong.append(f"{key}: no counterpart here: {REFUSED[key]}")
            elif key.startswith(harmless):
                left_out.setdefault(_UNKNOWN, []).append(key)
            else:
                unknown.append(key)
        except ValueError as error:
            wrong.append(f"{key}: {error}")
        except (TypeError, AttributeError):
            wrong.append(f"{key}: a value of another type is expected, got {value!r:.100}")
    if unknown:
        named = ", ".join(f"{key}{_place(key, lines)}{nearest(key, places)}" for key in unknown)
        wrong.append(f"settings that jaxglue does not know: {named}. Remove them to go on")
    return values, left_out, wrong


@contextlib.contextmanager
def _on_lines(where: str, lines: Mapping[str, int]) -> Iterator[None]:
    """Name the line of the setting that an error begins with, behind `where`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(where + _on_line(str(error).removeprefix(where), lines)) from None


def _on_line(text: str, lines: Mapping[str, int]) -> str:
    """Return an error that begins with a setting's name behind the line on which the file has it."""
    line = lines.get(text.partition(":")[0])
    return text if line is None else f"line {line}: {text}"


def _place(key: str, lines: Mapping[str, int]) -> str:
    return f" (line {lines[key]})" if key in lines else ""


def _left_out(reasons: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield a line for each reason with its settings, those that change the result first."""
    for reason in sorted(reasons, key=lambda reason: (reason not in CHANGES, reason == "off")):
        change = "left out, and the result may differ" if reason in CHANGES else "left out"
        yield f"{change}: {', '.join(reasons[reason])} ({reason})"


def foreign_kinds(
    recipe: Mapping[str, Any], cls: type, where: str, lines: Mapping[str, int] = NO_LINES
) -> dict[str, Any]:
    """Return the names of kinds in another program's recipe, by field; raise ValueError as `translate` does."""
    with _on_lines(where, lines):
        given = _flat(recipe, where)
        return _kinds(cls, with_objective(with_rollouts(with_one_name(given), where), where))


def _kinds(cls: type, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of kinds in a recipe, by field; bad values are read later."""
    reward = {"objective": "reward"} if recipe.get("reward_model") is True else {}
    named = {
        name: recipe[key] for name, kind in kind_names(cls).items() for key in (name, *kind.aliases) if key in recipe
    }
    return {**reward, **named}


def _is_default(chosen: Mapping[str, type], key: str, value: Any) -> bool:
    """Tell whether a setting of kinds that are not chosen has a default of theirs."""
    return any(is_default(group, key, value) for group in chosen.values() if issubclass(group, KindSettings))


def _places(chosen: Mapping[str, type]) -> Iterator[tuple[str, tuple[str, str, Kind]]]:
    """Yield the names of every group's fields, each with its group, field and declaration."""
    for group, members in chosen.items():
        if group == "distributed":  # names such as num_processes mean processes that we do not start
            continue
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
    full = program_of(recipe) in (AXOLOTL, TRL)
    named = {"adapter", "finetuning_type", "use_peft", "stage", "method", "full_finetuning"} & recipe.keys()
    return {"method": "full"} if full and not named else {}
