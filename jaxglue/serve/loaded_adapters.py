"""Adapters that clients load and unload while the server answers, from one folder."""

import asyncio
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from jaxglue.generation.assistant import Assistant
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.refusals import BadRequestError
from jaxglue.serve.served_models import ServedModel, ServedModels
from jaxglue.serve.service import Service


class LoadedAdapters:
    """Adapters in the spare ranks of a model, one change at a time.

    Args:
        assistant: with spare ranks.
        service: answers with them.
        models: by whose names requests find them.
        config: names their folder.
    """

    def __init__(self, assistant: Assistant, service: Service, models: ServedModels, config: ServeConfig):
        self._assistant, self._service, self._models = assistant, service, models
        assert config.adapter_folder is not None and assistant.spare is not None
        self._folder, self._base, self._spare = config.adapter_folder.resolve(), config.served_name, assistant.spare
        self._lock, self._names = asyncio.Lock(), set[str]()
        self._leaving = list[Bool[np.ndarray, " R"]]()
        """Ranks of unloaded adapters that answers under way may still use."""

    async def load(self, name: str, path: str) -> None:
        """Serve an adapter by a name.

        Raises:
            BadRequestError, ValueError: the name is taken, a folder elsewhere, or no adapter that fits.
        """
        async with self._lock:
            if name in self._models:
                raise BadRequestError(f"{name!r:.100} is served already: unload it, or choose another name")
            folder = self._inside(path)
            adapter = await asyncio.to_thread(self._spare.read, folder)
            self._free_unused()
            ranks = self._spare.take(adapter)
            try:
                voice = await asyncio.to_thread(self._assistant.voice, folder, ranks)
                weights = await asyncio.to_thread(self._spare.written, self._assistant.adapter, adapter, ranks)
                await asyncio.wrap_future(self._service.call(lambda: self._service.replace_adapter(weights)))
            except BaseException:
                self._spare.give_back(ranks)
                raise
            self._assistant.adapter = weights
            self._models.add(ServedModel(name, voice, parent=self._base, root=str(folder)))
            self._names.add(name)

    async def unload(self, name: str) -> None:
        """Serve an adapter no longer; answers under way end with it.

        Raises:
            BadRequestError: no adapter of this name was loaded.
        """
        async with self._lock:
            if name not in self._names:
                raise BadRequestError(f"no adapter {name!r:.100} was loaded: only such can be unloaded", 404)
            self._names.remove(name)
            ranks = self._models.remove(name).voice.ranks
            assert ranks is not None
            self._leaving.append(ranks)

    def _inside(self, path: str) -> Path:
        """Return a folder inside of that of adapters; links to elsewhere lead out."""
        try:
            folder = (self._folder / path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            folder = None
        if folder is None or not folder.is_dir() or not folder.is_relative_to(self._folder):
            message = f"lora_path {path!r:.100} is no folder inside of --adapter-folder"
            raise BadRequestError(message, parameter="lora_path")
        return folder

    def _free_unused(self) -> None:
        used = [ranks for ranks in self._leaving if self._service.uses(ranks)]
        for ranks in self._leaving:
            if not any(ranks is other for other in used):
                self._spare.give_back(ranks)
        self._leaving = used
