"""Recipes of torchtune, which name the Python objects that a run is made of, as flat settings."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

from jaxglue.settings.dialects.data_sets import named_source
from jaxglue.settings.dialects.values import Nested

_COMPONENT = "_component_"
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_OPTIMIZERS = {
    "AdamW": "adamw",
    **dict.fromkeys(("AdamW8bit", "PagedAdamW8bit", "AdamWFp8"), "adamw_8bit"),
    "PagedAdamW": "adamw",
}
"""Our optimizers by their classes; AdamWFp8 has moments of 8 bits, too."""
_LOSSES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")},
    "DPOLoss": {"objective": "dpo"},
    "RSOLoss": {"objective": "dpo", "loss_type": "hinge"},
}
_PREFERENCE = {"chosen": "chosen", "rejected": "rejected"}
_ANSWER = {"input": "question", "output": "answer"}
_ALPACA = {"instruction": "instruction", "input": "input", "output": "output"}


class _Builder(NamedTuple):
    """A function of torchtune that makes a data set, by what its rows are here."""

    source: str | None
    """Name on the hub; None where a recipe names one."""
    format: str = "auto"
    columns: Mapping[str, str] = MappingProxyType({})
    """Our names of columns by those of its `column_map`."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """Columns' names in the rows, by our names, where a recipe maps none."""
    trains_prompts: bool = False


_INPUT = {"question": "input", "answer": "output"}
_BUILDERS = {
    "alpaca_dataset": _Builder("tatsu-lab/alpaca", "alpaca", _ALPACA, trains_prompts=True),
    "alpaca_cleaned_dataset": _Builder("yahma/alpaca-cleaned", "alpaca", _ALPACA, trains_prompts=True),
    "chat_dataset": _Builder(None),
    "slimorca_dataset": _Builder("Open-Orca/SlimOrca-Dedup"),
    "instruct_dataset": _Builder(None, "question_answer", _ANSWER, _INPUT),
    "grammar_dataset": _Builder("liweili/c4_200m", "question_answer", _ANSWER, _INPUT),
    "samsum_dataset": _Builder(
        "Samsung/samsum", "question_answer", _ANSWER, {"question": "dialogue", "answer": "summary"}
    ),
    "text_completion_dataset": _Builder(None, "text"),
    "wikitext_dataset": _Builder(
        "EleutherAI/wikitext_document_level:wikitext-103-v1", "text", renamed={"text": "page"}
    ),
    "cnn_dailymail_articles_dataset": _Builder("ccdv/cnn_dailymail:3.0.0", "text", renamed={"text": "article"}),
    "preference_dataset": _Builder(None, columns=_PREFERENCE),
    "hh_rlhf_helpful_dataset": _Builder("RLHFlow/HH-RLHF-Helpful-standard", columns=_PREFERENCE),
    "stack_exchange_paired_dataset": _Builder(
        "lvwerra/stack-exchange-paired",
        columns={"prompt": "prompt", **_PREFERENCE},
        renamed={"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    ),
}
_SEVERAL = ("dataset", "dataset_val")
"""Parts of which a recipe may list several."""
_PAIRED_TEXTS = "stack_exchange_paired_dataset"
"""A builder of pairs whose prompts and answers are texts."""
_NOTED = ("alpaca_dataset", _PAIRED_TEXTS)
"""Keys of a data set by which its note is found."""
_FAMILIES = ("llama3_2_vision", "llama4", "flamingo")
"""Names in builders of models whose families there are none of here."""
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_SPLIT = "train"
_ROOM = (
    "device",
    "batch_size_val",
    "compile",
    "profiler",
    "log_peak_memory_stats",
    "log_level",
    "save_adapter_weights_only",
)
"""Settings without which a run computes the same."""


def with_flat_settings(recipe: Mapping[str, Any], where: str) -> Nested:
    """Return the recipe's settings by names that the other programs or jaxglue have.

    Raises:
        ValueError: a component without a counterpart; begins with `where` and the key.
    """
    settings = {key: value for key, value in recipe.items() if key not in _ROOM}
    if (every := settings.pop("run_val_every_n_steps", None)) is None:
        settings.pop("dataset_val", None)  # read with it alone
    settings["eval_steps"] = every
    if isinstance(limit := settings.get("max_steps_per_epoch"), int):
        settings["steps"] = limit * settings.get("epochs", 1)
    if (reference := _folder(settings.pop("ref_checkpointer", None))) not in (
        None,
        _folder(settings.get("checkpointer")),
    ):
        raise ValueError(f"{where}ref_checkpointer: {reference}: the reference is the model as training begins")
    flat: Nested = {}
    for key, read in _READERS.items():
        if (value := settings.pop(key, None)) is None:
            continue
        tables = value if isinstance(value, list) and key in _SEVERAL else [value]
        if not tables or not all(isinstance(table, Mapping) for table in tables):
            raise ValueError(f"{where}{key}: expected a table with {_COMPONENT}, got {value!r:.100}")
        try:
            flat |= read(value if key in _SEVERAL else dict(value))
        except ValueError as error:
            raise ValueError(f"{where}{key}: {error}") from None
    names = {"epochs": "num_train_epochs", "clip_grad_norm": "max_grad_norm", "log_every_n_steps": "logging_steps"}
    names |= {"batch_size": "per_device_train_batch_size", "optimizer_in_bwd": "update_in_backward"}
    flat |= {names.get(key, key): value for key, value in settings.items() if value is not None}
    if isinstance(output := flat.get("output_dir"), str):
        flat["output_dir"] = output.replace("${output_dir}", "")
    if flat.get("dtype") in _DTYPES:
        flat["dtype"] = _DTYPES[flat["dtype"]]
    if flat.pop("resume_from_checkpoint", False):
        raise ValueError(f"{where}resume_from_checkpoint: --resume continues a run of jaxglue's own")
    return flat


def _folder(checkpointer: Any) -> Any:
    return checkpointer.get("checkpoint_dir") if isinstance(checkpointer, Mapping) else None


def _class_of(table: dict[str, Any]) -> str:
    name = table.pop(_COMPONENT, None)
    if not isinstance(name, str):
        raise ValueError(f"expected {_COMPONENT}, the name of a Python object, got {name!r:.100}")
    return name.rpartition(".")[2]


def _refuse_rest(table: Mapping[str, Any]) -> None:
    if rest := [key for key, value in table.items() if value not in (None, False)]:
        raise ValueError(f"{', '.join(rest)}: not known here: remove it, or write it as a flag")


def _model(table: dict[str, Any]) -> Nested:
    name = _class_of(table)
    if family := next((family for family in _FAMILIES if family in name), None):
        raise ValueError(f"{name}: models of {family} are not read here: docs/models.md lists the families that are")
    if not name.startswith(("lora_", "qlora_")):
        _refuse_rest(table)
        return {"method": "full"}
    flat: Nested = {"method": "lora"}
    if name.startswith("qlora_") or table.pop("quantize_base", False):
        flat["quantize"] = "nf4"
    modules = table.pop("lora_attn_modules", ["q_proj", "v_proj"])
    if not isinstance(modules, list) or not {*modules} <= _ATTENTION.keys():
        raise ValueError(f"lora_attn_modules: expected {' | '.join(_ATTENTION)}, got {modules!r:.100}")
    targets = [_ATTENTION[module] for module in modules]
    targets += _FEED_FORWARD if table.pop("apply_lora_to_mlp", False) else ()
    targets += ["lm_head"] if table.pop("apply_lora_to_output", False) else []
    flat["targets"] = targets
    for theirs, ours in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
        if theirs in table:
            flat[ours] = table.pop(theirs)
    flat["dora"] = table.pop("use_dora", False)
    _refuse_rest(table)
    return flat


def _tokenizer(table: dict[str, Any]) -> Nested:
    _class_of(table)
    length = table.pop("max_seq_len", None)
    for name in ("path", "merges_file", "special_tokens_path", "vocab_path", "merges_path"):
        table.pop(name, None)
    _refuse_rest(table)
    return {} if length is None else {"seq_len": length}


def _checkpointer(table: dict[str, Any]) -> Nested:
    _class_of(table)
    folder = table.pop("checkpoint_dir", None)
    return {} if folder is None else {"model": folder}


def _datasets(value: Any) -> Nested:
    """Return the settings of a data set, or of several that are read one after another."""
    parts = _parts(value)
    if len(parts) == 1:
        return parts[0]
    packs = {part.pop("packing") for part in parts}
    notes = {key: part.pop(key) for part in parts for key in _NOTED if key in part}
    return {"data": [source for part in parts for source in _with_options(part)], "packing": packs == {True}, **notes}


def _held_out(value: Any) -> Nested:
    """Return held-out data sets as our sources, each with the settings of its rows."""
    return {"eval_data": [source for part in _parts(value) for source in _with_options(part)]}


def _parts(value: Any) -> list[Nested]:
    """Return the settings of each of one data set or several."""
    return [_dataset(dict(table)) for table in (value if isinstance(value, list) else [value])]


def _with_options(part: Nested) -> list[str]:
    """Return the sources of a data set's settings, `name?option=value`."""
    given = {key: value for key, value in part.items() if key not in ("data", "packing", *_NOTED)}
    query = "&".join(f"{key}={quote(value, safe='[]%:,=')}" for key, value in given.items())
    return [f"{name}?{query}" for name in part["data"]]


def _dataset(table: dict[str, Any]) -> Nested:
    """Return the settings of a data set's rows as flags name them, and its files."""
    name = _class_of(table)
    if name not in _BUILDERS:
        raise ValueError(f"expected one of {', '.join(_BUILDERS)}, got {name}: name the data with --data")
    builder = _BUILDERS[name]
    source, files = table.pop("source", builder.source), table.pop("data_files", None)
    subset = table.pop("subset", table.pop("name", None))
    if source is None and files is None:
        raise ValueError(f"{name} names no source")
    source = source if subset is None else f"{str(source).partition(':')[0]}:{subset}"
    names = [files] if isinstance(files, str) else files or [named_source(source, None)]
    flat: Nested = {"data": names, "packing": table.pop("packed", False)}
    flat |= {"format": builder.format} if builder.format != "auto" else {}
    if (split := table.pop("split", _SPLIT)) != _SPLIT:
        flat["split"] = split
    flat["loss_on"] = "all" if table.pop("train_on_input", builder.trains_prompts) else "assistant"
    renamed = _renamed(table, builder)
    if columns := ",".join(f"{new}={old}" for new, old in renamed.items() if new != old):
        flat["columns"] = columns
    if (system := table.pop("new_system_prompt", None)) is not None:
        if builder.format != "question_answer":
            raise ValueError(f"new_system_prompt: {system!r:.100}: --system names one for chats that have none")
        flat["system"] = system
    if builder.format == "alpaca":
        flat["alpaca_dataset"] = name
    if name == _PAIRED_TEXTS:
        flat[name] = name
    _refuse_rest(table)
    return flat


def _renamed(table: dict[str, Any], builder: _Builder) -> dict[str, str]:
    """Take the names of columns out of a data set's table; return those in the rows by ours."""
    renamed = dict(builder.renamed)
    if (given := table.pop("column_map", None)) is not None:
        if not isinstance(given, dict) or not given.keys() <= builder.columns.keys():
            raise ValueError(
                f"column_map: expected names of {', '.join(builder.columns) or 'none'}, got {given!r:.100}"
            )
        renamed = {ours: given.get(theirs, theirs) for theirs, ours in builder.columns.items()}
    chats, texts = table.pop("conversation_column", None), table.pop("column", None)
    table.pop("conversation_style", None)
    if chats not in (None, "messages", "conversations"):
        renamed["messages"] = chats
    if texts is not None:
        renamed["text"] = texts
    return renamed


def _optimizer(table: dict[str, Any]) -> Nested:
    name = _class_of(table)
    if name not in _OPTIMIZERS:
        raise ValueError(f"expected one of {', '.join(_OPTIMIZERS)}, got {name}")
    flat: Nested = {"optimizer": _OPTIMIZERS[name]}
    if (betas := table.pop("betas", None)) is not None:
        flat["beta1"], flat["beta2"] = betas
    for theirs, ours in (("lr", "learning_rate"), ("weight_decay", "weight_decay"), ("eps", "epsilon")):
        if theirs in table:
            flat[ours] = table.pop(theirs)
    table.pop("fused", None)
    _refuse_rest(table)
    return flat


def _schedule(table: dict[str, Any]) -> Nested:
    if (name := _class_of(table)) != "get_cosine_schedule_with_warmup":
        raise ValueError(f"expected get_cosine_schedule_with_warmup, got {name}: --schedule names ours")
    flat = {"schedule": "cosine", "warmup_steps": table.pop("num_warmup_steps", 0)}
    _refuse_rest(table)
    return flat


def _loss(table: dict[str, Any]) -> Nested:
    name = _class_of(table)
    if name not in _LOSSES:
        raise ValueError(f"expected one of {', '.join(_LOSSES)}, got {name}: --objective names ours")
    flat = dict(_LOSSES[name])
    table.pop("num_output_chunks", None)
    flat |= {key: table.pop(key) for key in ("beta", "label_smoothing") if key in table and flat}
    _refuse_rest(table)
    return flat


def _metric_logger(table: dict[str, Any]) -> Nested:
    name = _class_of(table)
    return {"log_to": ["tensorboard", "wandb"]} if name == "WandBLogger" else {}


_READERS: dict[str, Callable[[Any], Nested]] = {
    "model": _model,
    "tokenizer": _tokenizer,
    "checkpointer": _checkpointer,
    "dataset": _datasets,
    "dataset_val": _held_out,
    "optimizer": _optimizer,
    "lr_scheduler": _schedule,
    "loss": _loss,
    "metric_logger": _metric_logger,
}
"""Readers of the parts of a recipe."""
