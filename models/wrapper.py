"""Wrappers: models around a text model, such as one with a vision tower, as rows of a table.

A wrapper's folder trains its text model: config.json holds its settings as `text_config`, and the tensors of the other
parts pass through exports.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxglue.parts import Registry

TEXT_PATH = "model"
"""Path of the decoder among a text model's modules."""
BESIDE_VISION = "model.language_model"
"""The same among those of a model that is loaded with its vision tower."""
PROJECTORS = ("merger", "deepstack_merger_list", "multi_modal_projector", "embed_vision", "embed_audio")
"""Names of modules, and of a list of them, between towers and a text model."""
_SPELLINGS = ("model.language_model.", "language_model.model.")
"""Beginnings of a decoder's names in a wrapper: today's, and the one before transformers 4.52."""
_TOWER, _INNER = "vision_tower.", "vision_model."
_OLD_HEAD = "language_model."
"""Before the output projection's name in the older spelling."""
_CLASSIFIER = ("architectures", "id2label", "num_labels")
"""Entries of config.json that tell of a sequence classifier."""
_LISTS = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules")
"""Entries of `quantization_config` that name modules."""


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A model type around a text model."""

    model_type: str
    text_types: tuple[str, ...]
    """Model types that its text model may have; the first is the one without `model_type` in `text_config`."""
    others: tuple[str, ...]
    """Beginnings of the names of its other tensors, without a leading `model.`."""
    text_path: str = "model.language_model"
    """Path of the decoder among the modules that PEFT adapts."""
    tied: bool | None = None
    """Whether the output projection is the embedding where config.json says nothing; None: where files lack it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that its `text_config` may lack."""
    unread: tuple[str, ...] = ()
    """Fields of `text_config` that count for nothing, though the text model alone reads them."""

    tower: Callable[[Mapping[str, Any], Any, Mapping[str, Any]], Any] | None = None
    """Returns a `DecoderConfig` with the vision tower of a config.json; None where images are not read."""
    hearing: Callable[[Mapping[str, Any], Any], Any] | None = None
    """Returns a `DecoderConfig` that has this tower with that of clips of audio; None where these are not read."""
    text: "Spelling | None" = None
    """Names of its text model's tensors, where its files have others."""

    def names(self, stored: Iterable[str]) -> "TensorNames":
        """Return the names of a folder that has these tensors."""
        return TensorNames.of(self, stored)

    def owns(self, name: str) -> bool:
        """Tell whether a tensor belongs to a part beside the text model."""
        return name.removeprefix("model.").startswith(self.others)

    @property
    def unquantized(self) -> list[str]:
        """Return the modules that quantized folders leave as they are, as tools that compare beginnings name them."""
        modules = [name.rstrip(".") for name in self.others]
        return [*modules, *(f"model.{module}" for module in modules)]


WRAPPERS = Registry[Wrapper]("wrapper of a text model")
"""Wrappers by `model_type`."""


def wrap(wrapper: Wrapper) -> Wrapper:
    """Let folders of this model type be read; raise ValueError for a type that has a wrapper."""
    WRAPPERS.add(wrapper.model_type, wrapper)
    return wrapper


def find_wrapper(raw: Mapping[str, Any]) -> Wrapper | None:
    """Return the wrapper of a parsed config.json; None for a text model's."""
    model_type = raw.get("model_type")
    return WRAPPERS.get(model_type) if isinstance(model_type, str) else None


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parsed config.json as that of its text model.

    Raises:
        ValueError: a wrapper without an object `text_config`, or around a text model that it may not have.
    """
    wrapper = find_wrapper(raw)
    if wrapper is None:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config in config.json: {wrapper.model_type} needs an object, got {text!r:.100}")
    defaults = {"model_type": wrapper.text_types[0], **wrapper.defaults}
    fields = {**text, **{name: value for name, value in defaults.items() if text.get(name) is None}}
    if fields["model_type"] not in wrapper.text_types:
        raise ValueError(
            f"text_config in config.json: model_type {fields['model_type']!r:.100} is not supported inside "
            f"{wrapper.model_type}: known are {', '.join(wrapper.text_types)}"
        )
    for name in wrapper.unread:
        fields.pop(name, None)
    fields["tie_word_embeddings"] = ties(raw) or False
    fields |= {name: raw[name] for name in _CLASSIFIER if name in raw}
    if isinstance(quantization := raw.get("quantization_config", text.get("quantization_config")), Mapping):
        fields["quantization_config"] = _by_text_names(quantization)
    return fields


def ties(raw: Mapping[str, Any]) -> bool | None:
    """Return whether a wrapper's config.json ties the output projection to the embedding.

    None where its two levels differ or say nothing: transformers then ties it unless the files hold one.
    """
    wrapper, text = find_wrapper(raw), raw.get("text_config")
    assert wrapper is not None
    levels = (raw.get("tie_word_embeddings"), text.get("tie_word_embeddings") if isinstance(text, Mapping) else None)
    said = {level for level in levels if level is not None}
    return wrapper.tied if not said else said.pop() if len(said) == 1 else None


def with_text(raw: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a parsed config.json with other settings of its text model."""
    if find_wrapper(raw) is None:
        return {**raw, **changes}
    text: Any = raw["text_config"]
    return {**raw, "text_config": {**text, **changes}}


@dataclass(frozen=True)
class TensorNames:
    """Names of a text model's tensors in the files of a wrapper's folder."""

    wrapper: Wrapper
    decoder: str = _SPELLINGS[0]
    """Beginning of names, in place of `model.`."""
    head: str = ""
    """Beginning of names, before `lm_head.`."""
    around: str = "model."
    """Beginning of names of the parts around the text model."""
    inner: str = ""
    """Name of a module inside of the vision tower, which today's names leave out."""

    @classmethod
    def of(cls, wrapper: Wrapper, names: Iterable[str]) -> "TensorNames":
        """Find the spelling of a folder's tensors."""
        names = list(names)
        decoder = next((start for start in _SPELLINGS if _any(names, start)), None)
        head = _OLD_HEAD if decoder == _SPELLINGS[1] and not _any(names, "lm_head.") else ""
        parts = [name for name in names if wrapper.owns(name)]
        around = "" if parts and not _any(parts, "model.") else "model."
        inner = _INNER if any(f"{_TOWER}{_INNER}" in name for name in parts) else ""
        return cls(wrapper, decoder or _SPELLINGS[0], head, around, inner)

    def ours(self, stored: str) -> str | None:
        """Return a tensor's name as the text model's; None for the parts around it."""
        if stored.startswith(self.decoder):
            name = f"{TEXT_PATH}.{stored.removeprefix(self.decoder)}"
            return name if self.wrapper.text is None else self.wrapper.text.ours(name)
        if self.head and stored.startswith(f"{self.head}lm_head."):
            return stored.removeprefix(self.head)
        return None if self.wrapper.owns(stored) else stored

    def stored(self, name: str) -> str:
        """Invert `ours`."""
        if self.wrapper.owns(name):
            return self.around + name.removeprefix("model.").replace(_TOWER, _TOWER + self.inner, 1)
        name = name if self.wrapper.text is None else self.wrapper.text.stored(name)
        if name.startswith(f"{TEXT_PATH}."):
            return self.decoder + name.removeprefix(f"{TEXT_PATH}.")
        return self.head + name if name.startswith("lm_head.") else name


_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Names in the files of a model type whose modules have others; those of files that have the modules' stay.

    Layers of the files beyond the model's, which predict further tokens, pass through exports.
    """

    model_type: str
    parts: tuple[tuple[str, str], ...] = ()
    """Parts of the modules' names, and the files' in their place, in the order in which these are replaced."""
    experts: tuple[tuple[str, str], ...] = ()
    """Names of projections of experts alone, and the files'."""
    layers: int | None = None
    """Layers of the model, config.json's in place of any number here; None where the files have no others."""
    others: tuple[str, ...] = ()
    """Beginnings of the names of tensors that belong to no part of the model."""
    used: bool = True
    """The files are spelled so."""

    def names(self, stored: Iterable[str]) -> "Spelling":
        """Return the names of a folder that has these tensors."""
        stored = list(stored)
        return replace(self, used=not stored or any(self.ours(name) != name for name in stored))

    def ours(self, stored: str) -> str | None:
        """Return a tensor's name as the model's; None for layers beyond the model's, and other parts."""
        if self.layers is not None and (found := _LAYER.match(stored)) and int(found[1]) >= self.layers:
            return None
        if self.others and stored.startswith(self.others):
            return None
        for ours, theirs in self.parts if self.used else ():
            stored = stored.replace(theirs, ours)
        for ours, theirs in self.experts if self.used and ".experts." in stored else ():
            stored = stored.replace(f".{theirs}.", f".{ours}.")
        return stored

    def stored(self, name: str) -> str:
        """Invert `ours`."""
        for ours, theirs in self.experts if self.used and ".experts." in name else ():
            name = name.replace(f".{ours}.", f".{theirs}.")
        for ours, theirs in reversed(self.parts) if self.used else ():
            name = name.replace(ours, theirs)
        return name


SPELLINGS = Registry[Spelling]("spelling of tensors' names")
"""Spellings by `model_type`."""


def spell(spelling: Spelling) -> Spelling:
    """Let folders of this model type be read and written by these names; raise ValueError where it has others."""
    SPELLINGS.add(spelling.model_type, spelling)
    return spelling


def find_names(raw: Mapping[str, Any]) -> "Wrapper | Spelling | None":
    """Return the names of the files' tensors where they differ from the text model's; None where they are the same."""
    wrapper, text = find_wrapper(raw), raw.get("text_config")
    if wrapper is not None:
        named = {"model_type": wrapper.text_types[0], **text} if isinstance(text, Mapping) else {}
        return replace(wrapper, text=_spelling(named))
    return _spelling(raw)


def _spelling(raw: Mapping[str, Any]) -> Spelling | None:
    model_type = raw.get("model_type")
    spelling = SPELLINGS.get(model_type) if isinstance(model_type, str) else None
    if spelling is not None and spelling.layers is not None:
        layers = raw.get("num_hidden_layers")
        spelling = replace(spelling, layers=layers) if isinstance(layers, int) else None
    return spelling


def _any(names: Iterable[str], start: str) -> bool:
    return any(name.startswith(start) for name in names)


def to_text_name(name: str) -> tuple[str, str]:
    """Return a module's or tensor's name as the text model's, and the path of its decoder in that spelling."""
    for start in _SPELLINGS:
        if name.startswith(start):
            return f"{TEXT_PATH}.{name.removeprefix(start)}", start.rstrip(".")
    return name.removeprefix(_OLD_HEAD), TEXT_PATH


def from_text_name(name: str, path: str) -> str:
    """Return a text model's name with the decoder at another path; parts around it stay."""
    if is_beside_text(name):
        return name
    return f"{path}.{name.removeprefix(f'{TEXT_PATH}.')}" if name.startswith(f"{TEXT_PATH}.") else name


_EMBEDDER, _PROJECTION = re.compile(r"\bembed_vision\.(?=patch_|pos_)"), "embed_vision.multimodal_embedder."


def to_module_name(name: str, model_type: str | None) -> str:
    """Return a tensor's name among transformers' modules: files of Gemma 4 12B have others."""
    if model_type != "gemma4_unified_text":
        return name
    return name.replace("embed_vision.", _PROJECTION).replace("vision_embedder.", "embed_vision.")


def to_stored_name(name: str) -> str:
    """Invert `to_module_name`."""
    return _EMBEDDER.sub("vision_embedder.", name.replace(_PROJECTION, "embed_vision."))


def is_beside_text(name: str) -> bool:
    """Tell whether a module or tensor belongs to a part around the text model in any wrapper."""
    return any(wrapper.owns(name) for wrapper in WRAPPERS.values())


_ESCAPED = [(start, re.escape(start)) for start in _SPELLINGS]


def _by_text_names(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `quantization_config` whose lists name modules as the text model does."""

    def renamed(entry: Any) -> Any:
        if not isinstance(entry, str):
            return entry
        for start, escaped in _ESCAPED:
            entry = entry.replace(start, f"{TEXT_PATH}.").replace(escaped, rf"{TEXT_PATH}\.")
        return entry

    lists = {name: quantization[name] for name in _LISTS if isinstance(quantization.get(name), list)}
    return {**quantization, **{name: list(map(renamed, entries)) for name, entries in lists.items()}}
