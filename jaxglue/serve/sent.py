"""Texts with images of requests that are read in one pass: the forms in which clients send them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxglue.data.messages import is_image, read_chat
from jaxglue.data.read_rows import Shown
from jaxglue.generation.reading import PartReader, sent_images
from jaxglue.serve.fields import MOST_IMAGES
from jaxglue.serve.refusals import BadRequestError

_UNREAD = ("audio", "pdf", "video")


class Sent(NamedTuple):
    """A text of a request, and the images before it, which are not read yet."""

    text: str
    media: Sequence[Any]
    where: str
    """Field of the body."""

    def read(self, reader: PartReader) -> Shown:
        """Return what is shown; raise BadRequestError, with the field, for images that are refused."""
        try:
            return Shown(self.text, sent_images(reader, self.media))
        except ValueError as error:
            raise BadRequestError(f"{self.where}: {error}", parameter=self.where.partition("[")[0]) from error


def read_parts(value: Any, parameter: str) -> tuple[Any, Sequence[Any]]:
    """Return what a value says beside its images, and these, where it is a list of parts as a chat's content has."""
    images = [part for part in value if is_image(part)] if isinstance(value, list) else []
    if not images:
        return value, ()
    shown = read_chat([{"role": "user", "content": images}], None, parameter, sees=True).images
    return _joined([part for part in value if not is_image(part)], parameter), shown


def read_sent(value: Any, where: str) -> Sent:
    """Return a text, or an object that shows images.

    Args:
        value: a text; `{"text": …, "image": …}` as of Jina's clients, or with `images`; or `{"content": [part, …]}` as
            of vLLM's, parts as in chats.
        where: it is in the body.

    Raises:
        BadRequestError: something else, or nothing at all.
    """
    parameter, media = where.partition("[")[0], list[Any]()
    if isinstance(value, Mapping):
        if unread := next((name for name in _UNREAD if value.get(name) is not None), None):
            raise BadRequestError(f"{where}: {unread} is not read: send text and images", parameter=parameter)
        if value.get("content") is not None:
            value, shown = read_parts(value["content"], where)
            value, media = _joined(value, where) if isinstance(value, list) else value, [*shown]
        else:
            for images in (value.get("images"), value.get("image")):
                media += images if isinstance(images, list) else [] if images is None else [images]
            value = "" if value.get("text") is None and media else value.get("text")
    if not isinstance(value, str) or not (value.strip() or media):
        raise BadRequestError(
            f"{where} must be a text that is not empty, or an object with images", parameter=parameter
        )
    return Sent(value, media, where)


def require_few(values: Sequence[Any]) -> None:
    """Raise BadRequestError for more images than a request may have, in all of its values that show some."""
    count = sum(len(value.media) for value in values if isinstance(value, Sent))
    if count > MOST_IMAGES:
        raise BadRequestError(f"{count} images: at most {MOST_IMAGES} are taken")


def _joined(parts: Sequence[Any], parameter: str) -> str:
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise BadRequestError(f"{parameter}: parts beside images must be texts", parameter=parameter)
    return "\n".join(part["text"] for part in parts)
