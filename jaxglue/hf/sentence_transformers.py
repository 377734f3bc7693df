"""Folders of sentence-transformers: the files that make a model's folder one, and how such a folder is read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxglue.files.json_file import parse_json, read_json, write_json
from jaxglue.files.regular_file import read_regular_text

MODULES = "modules.json"
_TYPES = "sentence_transformers.models."
_POOLING = {"last": "lasttoken", "mean": "mean"}
_NAMES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def write_folder(folder: Path, record: Mapping[str, Any], dimension: int) -> None:
    """Write the files beside a model or adapter by which sentence-transformers reads it as training does.

    Args:
        folder: of the model.
        record: of its embeddings.
        dimension: of an embedding.
    """
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    listed = [{"idx": int(name), "name": name, "path": path, "type": _TYPES + kind} for name, path, kind in modules]
    (folder / MODULES).write_text(json.dumps(listed, indent=2) + "\n")
    wanted = _POOLING[record["pooling"]]
    modes = {f"pooling_mode_{_old_name(name)}": name == wanted for name in _NAMES}
    for name in ("1_Pooling", "2_Normalize"):
        (folder / name).mkdir(exist_ok=True)
    write_json(
        folder / "1_Pooling/config.json", {"word_embedding_dimension": dimension, **modes, "include_prompt": True}
    )
    write_json(folder / "2_Normalize/config.json", {})
    write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": record["max_text_length"], "do_lower_case": False}
    )
    prompts = {"query": record["query_prompt"], "document": record["document_prompt"]}
    settings: dict[str, Any] = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", settings)


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the record of a folder of sentence-transformers; empty for others.

    Raises:
        ValueError: modules beside a transformer, its pooling and a norm, or another pooling.
    """
    if not (folder / MODULES).is_file():
        return {}
    modules = parse_json(read_regular_text(folder / MODULES), str(folder / MODULES))
    if not isinstance(modules, list) or not all(isinstance(each, dict) and "type" in each for each in modules):
        raise ValueError(f"{folder / MODULES}: expected a list of modules")
    kinds = [str(each["type"]).rpartition(".")[2] for each in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        what = "of which Transformer, Pooling and Normalize are read"
        raise ValueError(f"{folder / MODULES}: modules {', '.join(kinds)}, {what}")
    pooling = read_json(folder / str(modules[1].get("path", "1_Pooling")) / "config.json")
    modes = [name for name in _NAMES if pooling.get(f"pooling_mode_{_old_name(name)}")]
    mode = pooling.get("pooling_mode", modes[0] if len(modes) == 1 else None)
    found = next((name for name, theirs in _POOLING.items() if theirs == mode), None)
    if found is None or pooling.get("include_prompt") is False:
        raise ValueError(f"{folder}: texts are read at their last token or as a mean with prompts, not by {mode!r}")
    settings = _optional(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    length = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    return {
        "kind": "embed",
        "pooling": found,
        "query_prompt": prompts.get("query") or "",
        "document_prompt": prompts.get("document") or "",
        **({"max_text_length": int(length)} if length else {}),
    }


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _old_name(mode: str) -> str:
    """Return a mode's name in the fields of versions before 6."""
    return {"cls": "cls_token"}.get(mode, f"{mode}_tokens" if mode in ("max", "mean", "weightedmean") else mode)
