"""Prompts with images: their tokens, and the features that stand in for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32
from transformers import PreTrainedTokenizerBase

from jaxglue.data.images import ImageRules
from jaxglue.data.messages import Chat
from jaxglue.data.prepare import read_vision
from jaxglue.data.template import ChatTemplate
from jaxglue.generation.engine import Engine
from jaxglue.models.parameters import Params
from jaxglue.vision.images import ImageSource
from jaxglue.vision.rows import Image, PromptImages, read_prompt

Admit = Callable[[int], None]
_LOCK = Lock()
MOST_PIXELS = 2**25
"""Of an image of a prompt."""
_KEPT = 64
"""Images whose features are kept for further turns of a conversation."""


class Prompt(NamedTuple):
    """An encoded prompt."""

    tokens: list[int]
    images: PromptImages | None = None


@dataclass(frozen=True)
class Sight:
    """What a loaded model makes of images.

    Args:
        rules: of its images.
        engine, trainable, frozen: of the model.
        kept: features of recent images.
    """

    rules: ImageRules
    engine: Engine
    trainable: Params
    frozen: Params
    kept: dict[tuple, np.ndarray]

    def encode(
        self, template: ChatTemplate, text: str, sources: Sequence[ImageSource], admit: Admit | None = None
    ) -> Prompt:
        """Return the prompt of a rendering of protected messages with these images.

        Args:
            template: of the rendering.
            text: of it.
            sources: of the images.
            admit: raises an error for too many tokens, before the tower runs.

        Raises:
            ValueError: an image that cannot be read, or other places in the rendering.
        """
        if not sources:
            return Prompt(template.encode(text))
        images = [self.rules.see(source, number, MOST_PIXELS) for number, source in enumerate(sources, 1)]
        tokens, places = self.rules.encode(template, text, [image.grid for image in images])
        if admit is not None:
            admit(len(tokens))
        return self._prompt(tokens, images, places)

    def place(self, tokens: Sequence[int], sources: Sequence[tuple[int, ImageSource]]) -> Prompt:
        """Return a prompt of tokens that already have those of images, by the first one of each.

        Raises:
            ValueError: an image that cannot be read, or of other tokens than there are.
        """
        known, images, places, end = np.array(tokens), list[Image](), list[np.ndarray](), 0
        for number, (first, source) in enumerate(sources, 1):
            image = self.rules.see(source, number, MOST_PIXELS)
            count = self.rules.processor.tokens(image.grid)
            own = self.rules.places(known, first, count)
            if len(own) < count or own[0] != first or first < end or own[-1] - first > count + image.grid.rows:
                raise ValueError(
                    f"image {number} has {count} tokens here, and the prompt has other ones from token {first} on"
                )
            images.append(image)
            places.append(own)
            end = int(own[-1]) + 1
        return self._prompt([*tokens], images, np.concatenate(places))

    def _prompt(self, tokens: list[int], images: Sequence[Image], places: Int32[np.ndarray, " I"]) -> Prompt:
        return Prompt(*read_prompt(tokens, images, places, self._features, self.rules.processor))

    def _features(self, image: Image) -> np.ndarray:
        with _LOCK:  # threads of a server encode prompts at once
            features = self.kept.pop(image.cache_key, None)
            if features is None:
                features = self.engine.see(self.trainable, self.frozen, [image], self.rules.processor)
            self.kept[image.cache_key] = features  # the latest at the end
            while len(self.kept) > _KEPT:
                del self.kept[next(iter(self.kept))]
        return features


def make_rules(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, files: Path | None, **limits: int | None
) -> ImageRules | None:
    """Return the rules for images of prompts; None for a model that sees none.

    Args:
        folder: of the model.
        tokenizer: of the model.
        files: folder of relative paths; None where prompts may name no files.
        limits: of images, as `read_vision` takes them.
    """
    processor = read_vision(folder, tokenizer, **limits)
    return None if processor is None else ImageRules.of(processor, tokenizer, files)


def attach(rules: ImageRules | None, chat: Chat, media: Sequence[Any]) -> Chat:
    """Return a chat with its images; raise ValueError for images and a model that sees none."""
    if rules is None:
        if media or chat.images:
            raise ValueError("the prompt has images, and this model, or its tokenizer, has nothing to see them with")
        return chat
    return rules.attach(chat, media)
