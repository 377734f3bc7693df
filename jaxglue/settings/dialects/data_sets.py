"""Data sets as other programs name them: axolotl's lists, TRL's and LLaMA-Factory's names."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any
from urllib.parse import quote

from jaxglue.settings.config import is_jinja

_FORMATS = {
    **dict.fromkeys(("chat_template", "sharegpt", "chat", "chat_template.default", "chat_template.argilla"), "auto"),
    "bradley_terry.chat_template": "auto",
    **{"alpaca": "alpaca", "completion": "text", "pretrain": "text"},
    "input_output": "segments",
}
"""Row formats by axolotl's types."""
_TEXTS = ("completion", "pretrain")
"""axolotl's types of texts without chats."""
_SYSTEM = "{% if system %}### System:\n{{ system }}\n\n{% endif %}"
_ORCA = (
    "{% if system_prompt %}### System:\n{{ system_prompt }}\n{% endif %}### Human:\n{{ question }}\n### Assistant:\n"
)
_INSTRUCT = (
    "{% if row.get('input') %}### Instruction:\n{{ instruction }}\n\n### Input:\n{{ input }}\n\n### Response:\n"
    "{% else %}### Instruction:\n{{ instruction }}\n\n### Response:\n{% endif %}"
)
_CHAT = "USER: {{ instruction }}\n{% if row.get('input') %}{{ input }}\n{% endif %}ASSISTANT:"
_ALPACA = (
    "Below is an instruction that describes a task{% if row.get('input') %}, paired with an input that provides "
    "further context{% endif %}. Write a response that appropriately completes the request."
)
_QUESTIONS = (
    "Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that appropriately and "
    "concisely completes the request.\n\n"
)
_STYLES = {
    "chat": (
        "SYSTEM: {system}\n",
        "USER: {{ instruction }}\n{{ input }}\nASSISTANT:",
        "USER: {{ instruction }}\nASSISTANT:",
    ),
    "chatml": (
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{{ instruction }}\n{{ input }}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{{ instruction }}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": (
        "<|system|>\n{system}<|end|>\n",
        "<|user|>\n{{ instruction }}<|end|>{{ input }}<|assistant|>",
        "<|user|>\n{{ instruction }}<|end|>\n<|assistant|>\n",
    ),
}
"""Styles of Alpaca's prompt: its beginning, and the turn of a row with an input and of one without."""
_CONTEXT = "Use the following contextual information to concisely answer the question.\n"
_PATTERNS: dict[str, tuple[str, str]] = {
    "alpaca_w_system.load_open_orca": (_ORCA, "{{ response }}"),
    "alpaca_w_system.load_instruct": (_SYSTEM + _INSTRUCT, "{{ output }}"),
    **{
        f"alpaca:{style}": (
            f"{head.replace('{system}', _ALPACA)}{{% if row.get('input') %}}{turn}{{% else %}}{short}{{% endif %}}",
            "{{ output }}",
        )
        for style, (head, turn, short) in _STYLES.items()
    },
    "alpaca_chat.load_qa": (f"SYSTEM: {_QUESTIONS}\nUSER: {{{{ question }}}}\nASSISTANT:", "{{ answer }}"),
    **dict.fromkeys(("alpaca_w_system", "alpaca_w_system.load_chat"), (_SYSTEM + _CHAT, "{{ output }}")),
    "context_qa": (_CONTEXT + "USER: {{ article }}\n===\n{{ question }}\nASSISTANT:", "{{ answer }}"),
    "context_qa.load_v2": ("Context: {{ context }}\nQuestion: {{ question }}\n", "Answer: {{ answer }}"),
}
"""Prompts and completions by axolotl's further types."""
_CUSTOM = (
    "system_prompt",
    "system_format",
    "field_system",
    "field_instruction",
    "field_input",
    "field_output",
    "format",
)
"""Keys of a type of one's own in axolotl; `no_input_format` may be absent."""
_ANSWERS = "chat_template.default"
"""axolotl's type of pairs of answers."""
_THINKING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning that templates read."""
_WEIGHTS = ("train", "training", "weight", "loss_weight")
"""Names of a message's key that says whether it is trained on."""
_ROWS = {"role": ("role", "from"), "content": ("content", "value")}
"""Names of a message's keys that are read without renaming."""


def with_our_data(recipe: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the recipe with TRL's data set as our sources, and names of templates and data sets apart from files.

    Raises:
        ValueError: a name that is no text; begins with `where` and the key.
    """
    values = dict(recipe)
    if "dataset" in values and "eval_dataset" in values:  # LLaMA-Factory's are names in its dataset_info.json
        values["dataset"] = (values["dataset"], values.pop("eval_dataset"))
    template = str(values.get("chat_template"))
    if "chat_template" in values and not (os.path.isfile(template) or is_jinja(template)):
        values["template"] = values.pop("chat_template")
    if "chat_template_jinja" in values:
        values["chat_template"] = values.pop("chat_template_jinja")
    if "dataset_id_or_path" in values:
        values["dataset_name"] = values.pop("dataset_id_or_path")
    for key, read in _MIXTURES.items():
        if values.get(key) is not None:
            try:
                values |= read(values.pop(key), values)
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{where}{key}: {error}") from None
    if not values.get("dataset_name"):
        return values
    names = {key: values.pop(key, None) for key in ("dataset_name", "dataset_config", "dataset_test_split")}
    if wrong := next((key for key, name in names.items() if not isinstance(name, str | None)), None):
        raise ValueError(f"{where}{wrong}: expected a name, got {names[wrong]!r:.100}")
    return values | _hub_data(*names.values())


def _mixture(mixture: Any, _: dict[str, Any]) -> dict[str, Any]:
    """Return the sources of TRL's mixture, or of the alignment handbook's; held-out ones are those of a split test."""
    if not isinstance(mixture, dict) or not isinstance(mixture.get("datasets"), list):
        raise ValueError("expected a table with a list of datasets")
    more: dict[str, Any] = {"streaming": True} if mixture.get("streaming") else {}
    if unknown := mixture.keys() - {"datasets", "test_split_size", "seed", "streaming"}:
        raise ValueError(f"{', '.join(sorted(unknown))}: not known here")
    sources: dict[str, list[str]] = {"data": [], "eval_data": []}
    for item in mixture["datasets"]:
        name, subset = item.get("path", item.get("id")), item.get("name", item.get("config"))
        if not isinstance(name, str):
            raise ValueError(f"each data set needs a path, got {item!r:.100}")
        files = item.get("data_files")
        names = (
            [files]
            if isinstance(files, str)
            else files or [named_source(name, None if subset == "default" else subset)]
        )
        split = _part(item.get("split", "train"), item.get("weight"))
        group = "eval_data" if split.startswith(("test", "validation")) else "data"
        sources[group] += [name if split == "train" else f"{name}?split={split}" for name in names]
    if (size := mixture.get("test_split_size")) is not None and not sources["eval_data"]:
        more["eval_fraction"] = size
    return {key: names for key, names in sources.items() if names} | more


def _mixer(mixer: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the sources of the alignment handbook's shares of data sets, with its splits and configurations."""
    if not isinstance(mixer, dict):
        raise ValueError("expected data sets with the share of each that is read")
    splits, configs = values.pop("dataset_splits", None) or ["train"], values.pop("dataset_configs", None) or []
    if len(configs) not in (0, len(mixer)):
        raise ValueError(f"dataset_configs: expected one for each of {len(mixer)} data sets, got {len(configs)}")
    sources: dict[str, list[str]] = {"data": [], "eval_data": []}
    for split in splits:
        group = "eval_data" if "test" in split else "data"
        for index, (name, share) in enumerate(mixer.items()):
            part = split if group == "eval_data" else _part(split, share)  # held-out splits are read whole there
            source = named_source(name, configs[index] if configs else None)
            sources[group].append(source if part == "train" else f"{source}?split={part}")
    return {key: names for key, names in sources.items() if names}


def _stream(data: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return axolotl's streams of texts, a name or a list of data sets."""
    items = [{"path": data}] if isinstance(data, str) else data if isinstance(data, list) else [data]
    items = [{"path": item} if isinstance(item, str) else {"type": "pretrain", **item} for item in items]
    for item in items:
        for key in ("skip", "trust_remote_code"):
            if item.pop(key, None):
                raise ValueError(f"{key}: not here: leave it out")
        if (column := item.pop("text_column", "text")) != "text":
            item["field"] = column
    read = data_sets("data", long_texts="split" if values.get("sample_packing") else "truncate")
    return {"data": list(read(items)["data"]["data"]), "format": "text", "streaming": True}


_MIXTURES: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "dataset_mixture": _mixture,
    "dataset_mixer": _mixer,
    "pretraining_dataset": _stream,
}
"""Readers of settings with several data sets; they take settings beside them out of the recipe."""


def _part(split: str, share: Any) -> str:
    """Return a split, or the part of it that a share below 1 stands for."""
    if share in (None, 1):
        return split
    if not isinstance(share, int | float) or not 0 < share < 1:
        raise ValueError(f"the share of a data set: expected a number above 0, at most 1, got {share!r:.100}")
    return f"{split}[:{100 * share:g}%]"


def named_source(name: str, subset: str | None) -> str:
    """Return a file as it is, and a name on the hub with our prefix."""
    return name if os.path.exists(name) else "hf:" + ":".join(filter(None, [name, subset]))


def _hub_data(name: str, subset: str | None, held_out: str | None) -> dict[str, Any]:
    source = named_source(name, subset)
    return {"data": [source], **({"eval_data": [f"{source}?split={held_out}"]} if held_out else {})}


def data_sets(field: str, long_texts: str = "split") -> Callable[[Any], dict[str, Any]]:
    """Return a reader of axolotl's list of data sets; it raises ValueError for other values.

    Args:
        field: of [data], that gets the sources.
        long_texts: treatment of texts without chats that are longer than a row.
    """

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, list) or not all(isinstance(item, dict) and "path" in item for item in value):
            raise ValueError("expected a list of data sets, each with its path")
        return {"data": {field: tuple(source for item in value for source in _sources(dict(item), long_texts))}}

    return read


def _sources(item: dict[str, Any], long_texts: str) -> list[str]:
    """Return a data set's files, or its name on the hub, with the settings of its rows."""
    path, files, subset = item.pop("path"), item.pop("data_files", []), item.pop("name", None)
    for key in ("ds_type", *(key for key in ("trust_remote_code", "revision", "shards", "skip") if not item.get(key))):
        item.pop(key, None)
    for name in (path, *([files] if isinstance(files, str) else files), *([subset] if subset else [])):
        if not isinstance(name, str):
            raise ValueError(f"expected names, got {name!r:.100}")
    hub = not os.path.exists(path) and not Path(path).suffix and path.count("/") == 1
    names = [files] if isinstance(files, str) else files
    names = names or ["hf:" + ":".join(filter(None, [path, subset])) if hub else path]
    given = _row_options(path, item, long_texts)
    options = "&".join(f"{key}={quote(value, safe='[]%:,=')}" for key, value in given.items())
    return [f"{name}?{options}" if options else str(name) for name in names]


def _row_options(path: str, item: dict[str, Any], long_texts: str) -> dict[str, str]:
    """Return the settings of a data set's rows that differ from the defaults; takes them out of `item`."""
    options: dict[str, str] = {}
    kind = item.pop("type", "chat_template")
    pattern = _own_pattern(path, kind) if isinstance(kind, dict) else None
    if isinstance(kind, str):
        pattern = _PATTERNS.get(kind)
    if pattern:
        options["prompt"], options["completion"] = pattern
    elif not isinstance(kind, str) or kind not in _FORMATS:
        raise ValueError(f"{path}: type: expected {' | '.join([*_FORMATS, *_PATTERNS])}, got {kind!r:.100}")
    elif _FORMATS[kind] != "auto":
        options["format"] = _FORMATS[kind]
    if kind in _TEXTS:
        options["overlong"] = long_texts
    if (split := item.pop("split", "train")) != "train":
        options["split"] = str(split)
    names = {
        "text": "field",
        **{name: f"field_{name}" for name in ("messages", "chosen", "rejected", "system", "tools")},
    }
    columns = {name: item.pop(theirs, name) for name, theirs in names.items()}
    if kind == _ANSWERS and columns["messages"] == "prompt":
        columns["messages"] = "messages"  # prompts of pairs are read by this name
    renamed = [f"{new}={old}" for new, old in columns.items() if old not in (new, "conversations")]
    if renamed:
        options["columns"] = ",".join(renamed)
    mapping = item.pop("message_property_mappings", {})
    for key, known in _ROWS.items():
        given = item.pop(f"message_field_{key}", mapping.pop(key, known[0]))
        if given not in known:
            raise ValueError(f"{path}: {key} of a message: expected {' | '.join(known)}, got {given!r:.100}: rename it")
    for key in ("field_thinking", "template_thinking_key"):
        if (given := item.pop(key, _THINKING[0])) not in _THINKING:
            raise ValueError(f"{path}: {key}: expected {' | '.join(_THINKING)}, got {given!r:.100}: rename it")
    if (weight := item.pop("message_field_training", None) or _WEIGHTS[0]) not in _WEIGHTS:
        raise ValueError(
            f"{path}: message_field_training: expected {' | '.join(_WEIGHTS)}, got {weight!r:.100}: rename it"
        )
    if (ends := item.pop("train_on_eos", "turn")) != "turn":
        raise ValueError(f"{path}: train_on_eos: expected turn, got {ends!r:.100}")
    _check_roles(path, item.pop("roles", {}))
    if item.pop("roles_to_train", ["assistant"]) not in (["assistant"], ["gpt"], ["assistant", "gpt"]):
        raise ValueError(f"{path}: roles_to_train: the loss is on the assistant's turns, or on all: --loss-on all")
    item.pop("chat_template", None)
    if unknown := [*item, *mapping]:
        raise ValueError(f"{path}: settings that jaxglue does not know: {', '.join(unknown)}. Remove them to go on")
    return options


def _own_pattern(path: str, kind: dict[str, Any]) -> tuple[str, str]:
    """Return prompt and completion of a type of one's own in axolotl, with its fields and formats."""
    kind = {key: value for key, value in kind.items() if value is not None}
    if unknown := kind.keys() - {*_CUSTOM, "no_input_format"}:
        raise ValueError(f"{path}: type: unknown {', '.join(sorted(unknown))}: expected {', '.join(_CUSTOM)}")
    if wrong := [key for key, value in kind.items() if not isinstance(value, str)]:
        raise ValueError(f"{path}: type: {wrong[0]}: expected a text, got {kind[wrong[0]]!r:.100}")
    if missing := [key for key in ("field_instruction", "field_output", "format") if key not in kind]:
        raise ValueError(f"{path}: type: {', '.join(missing)} is missing")
    given, system = kind.get("field_input"), kind.get("field_system")
    names = {"instruction": _column(kind["field_instruction"]), "input": _column(given, "") if given else "''"}
    turn = _as_jinja(kind["format"], names)
    if given and kind.get("no_input_format") is not None:
        short = _as_jinja(kind["no_input_format"], names)
        turn = f"{{% if {names['input']} %}}{turn}{{% else %}}{short}{{% endif %}}"
    shown = _column(system, kind.get("system_prompt", "")) if system else repr(kind.get("system_prompt", ""))
    head = _as_jinja(kind.get("system_format", "{system}"), {"system": shown})
    return f"{{% if {shown} %}}{head}{{% endif %}}{turn}", f"{{{{ {_column(kind['field_output'])} }}}}"


def _column(name: str, absent: str | None = None) -> str:
    """Return a Jinja expression of a row's column, whatever its name."""
    row = f"row[{name!r}]"
    return row if absent is None else f"(row[{name!r}] or {absent!r} if {name!r} in row else {absent!r})"


def _as_jinja(text: str, names: Mapping[str, str]) -> str:
    """Return a text of Python's format, with names in braces, as Jinja."""
    parts = []
    for literal, name, *_ in Formatter().parse(text):
        parts.append("{{ " + repr(literal) + " }}" if literal else "")
        if name is not None:
            if name not in names:
                raise ValueError(f"a format may name {', '.join(names)}, got {{{name}}}")
            parts.append("{{ " + names[name] + " }}")
    return "".join(parts)


def _check_roles(path: str, roles: Any) -> None:
    """Refuse names of roles other than those that rows may have for them."""
    known = {"user": {"user", "human"}, "assistant": {"assistant", "gpt", "chatgpt", "model"}, "tool": {"tool"}}
    for role, names in dict(roles).items():
        if other := {names} - known.get(role, {role}) if isinstance(names, str) else {*names} - known.get(role, {role}):
            named = ", ".join(map(repr, sorted(other)))
            raise ValueError(f"{path}: roles: {named:.100} stands for {role}: rename it in the rows")
