"""Data sets of LLaMA-Factory by their names in `dataset_info.json`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxglue.files.json_file import read_json

_FILE = "dataset_info.json"
_ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_SAME = ("system", "tools", "chosen", "rejected", "kto_tag", "images", "videos", "audios")
"""Columns that have the same names here."""
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
_TAGS = {
    **{"role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user")},
    **{"assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool")},
    **{"function_tag": ("function_call",), "system_tag": ("system",)},
}
"""Names of keys and roles that rows are read with, by the tags that name them."""
_KNOWN_KEYS = (
    *("formatting", "ranking", "columns", "tags", "file_name", "hf_hub_url", "subset", "split", "num_samples"),
    *_ELSEWHERE,
)


def described_sources(recipe: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the recipe with its named data sets as our sources, where its folder describes them.

    Raises:
        ValueError: a name that the folder does not describe, or a description that no option of ours expresses.
    """
    folder = Path(str(recipe.get("dataset_dir", "data")))
    names = {key: recipe.get(key) for key in ("dataset", "eval_dataset")}
    if not isinstance(names["dataset"], str | list) or not (folder / _FILE).is_file():
        return dict(recipe)
    known, values = read_json(folder / _FILE), dict(recipe)
    texts = recipe.get("stage") == "pt"
    rows = values.pop("max_samples", None)
    values.pop("dataset_dir", None)
    for key, field in (("dataset", "data"), ("eval_dataset", "eval_data")):
        given = values.pop(key, None)
        if given is None:
            continue
        listed = given.split(",") if isinstance(given, str) else given
        if any(isinstance(info := known.get(str(name).strip()), dict) and info.get("num_samples") for name in listed):
            values["dataset_sample"] = True
        values[field] = [
            _source(str(name).strip(), known, folder, rows, f"{where}{key}: ", texts=texts) for name in listed
        ]
    return values


def _source(name: str, known: Mapping[str, Any], folder: Path, rows: Any, where: str, *, texts: bool) -> str:
    """Return a described data set as `name?option=value`; with `texts` its prompts are texts to train on."""
    info = known.get(name)
    if not isinstance(info, dict):
        raise ValueError(f"{where}{name}: {folder / _FILE} does not describe it; it has {', '.join(known):.200}")
    where = f"{where}{name}: "
    if elsewhere := next((key for key in _ELSEWHERE if key in info and "hf_hub_url" not in info), None):
        raise ValueError(f"{where}{elsewhere}: only files and the Hugging Face hub are read: save its rows to a file")
    if unknown := [key for key, value in info.items() if key not in _KNOWN_KEYS and value is not None]:
        raise ValueError(f"{where}{', '.join(unknown)} has no counterpart: remove it to go on")
    if not ({"hf_hub_url", "file_name"} & info.keys()):
        raise ValueError(f"{where}it has neither file_name nor hf_hub_url in {folder / _FILE}: add one")
    if "hf_hub_url" in info:
        path = "hf:" + ":".join(filter(None, [info["hf_hub_url"], info.get("subset")]))
    else:
        path = os.fspath(folder / str(info["file_name"]))
    options = {"split": info["split"]} if info.get("split", "train") != "train" else {}
    alpaca = info.get("formatting", "alpaca") == "alpaca"
    columns = info.get("columns", {})
    if texts and alpaca:
        column = columns.get("prompt", _ALPACA["prompt"])
        options |= {"format": "text"} | ({"columns": f"text={column}"} if column != "text" else {})
    else:
        options |= _columns(columns, where, alpaca=alpaca)
    _check_tags(info.get("tags", {}), where)
    if alpaca and not texts and not info.get("ranking") and "kto_tag" not in info.get("columns", {}):
        options["format"] = "alpaca_chat"
    if counts := [count for count in (rows, info.get("num_samples")) if count is not None]:
        options["rows"] = str(min(counts) if all(isinstance(count, int) for count in counts) else counts[0])
    query = "&".join(f"{key}={quote(str(value), safe='[]%:,=')}" for key, value in options.items())
    return f"{path}?{query}" if query else path


def _columns(columns: Mapping[str, Any], where: str, *, alpaca: bool) -> dict[str, str]:
    """Return the option that renames a data set's columns."""
    ours = {**{name: name for name in _SAME}, **(_ALPACA if alpaca else {})}
    renamed = []
    for name, old in columns.items():
        if name == "messages" and not alpaca:
            renamed += [] if old in ("messages", "conversations") else [f"messages={old}"]
        elif name not in ours:
            raise ValueError(f"{where}columns: {name} is not read")
        elif ours[name] != old:
            renamed.append(f"{ours[name]}={old}")
    return {"columns": ",".join(renamed)} if renamed else {}


def _check_tags(tags: Mapping[str, Any], where: str) -> None:
    for tag, name in tags.items():
        if name not in _TAGS.get(tag, ()):
            expected = " | ".join(_TAGS[tag]) if tag in _TAGS else "no such tag"
            raise ValueError(f"{where}tags: {tag}: expected {expected}, got {name!r:.100}: rename it in the rows")
