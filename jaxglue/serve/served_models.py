"""Names by which requests ask for the base or an adapter on it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxglue.generation.assistant import Voice
from jaxglue.serve.refusals import BadRequestError


@dataclass(frozen=True)
class ServedModel:
    """The base, or an adapter on it."""

    name: str
    voice: Voice
    parent: str | None = None
    """Name of an adapter's base."""
    root: str | None = None
    """Folder from which it was loaded."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time of its loading, seconds since 1970."""


class ServedModels:
    """Models by their names, the base first.

    Args:
        base: answers requests that name no model.
    """

    def __init__(self, base: ServedModel):
        self._models = {base.name: base}
        self.base = base

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def add(self, model: ServedModel) -> None:
        """Serve a further model; one of the same name is replaced."""
        self._models[model.name] = model

    def remove(self, name: str) -> ServedModel:
        """Serve an adapter no longer, and return it; BadRequestError as of `find`."""
        return self._models.pop(self.find(name).name)

    def find(self, name: Any) -> ServedModel:
        """Return a model by its name, or the base for none.

        Raises:
            BadRequestError: no such model.
        """
        if name is None or name == "":
            return self.base
        if not isinstance(name, str) or name not in self._models:
            message = f"model {name!r:.100} is not served: use one of {', '.join(self._models)}"
            raise BadRequestError(message, 404, code="model_not_found", parameter="model")
        return self._models[name]
