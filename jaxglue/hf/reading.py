"""The file in a model's or adapter's folder that says how it answers in one pass, and with what."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxglue.files.json_file import read_json, write_json

RECORD = "one_pass.json"
SENTENCE_FILES = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Normalize/config.json",
)
"""Files of a folder of sentence-transformers beside its model's."""
KINDS = ("decide", "embed", "rerank")
"""What such models are for."""


def write_record(folder: Path, kind: str, values: Mapping[str, Any]) -> None:
    """Write the record into a folder."""
    write_json(folder / RECORD, {"kind": kind, **values})


def carry_record(source: Path, target: Path) -> None:
    """Copy the record of a folder into another, with the files that tell sentence-transformers the same."""
    for name in (RECORD, *SENTENCE_FILES):
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


def read_record(*folders: Path | None) -> dict[str, Any]:
    """Return the record of the first folder that has one; empty without.

    Raises:
        ValueError: a damaged file, or an unknown kind.
    """
    path = next((path for folder in folders if folder and (path := folder / RECORD).is_file()), None)
    if path is None:
        return {}
    record = read_json(path)
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        raise ValueError(f"{path}: expected an object with a kind of {', '.join(KINDS)}: write it anew, or remove it")
    temperatures = record.get("temperatures", {})
    if not isinstance(temperatures, dict) or not all(map(_is_positive, temperatures.values())):
        raise ValueError(f"{path}: temperatures must be positive numbers by type of question: mend them")
    return record


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
