"""Images and clips of strangers: where rows hold them, their bytes, and pixels, with bounds before decoding."""

import base64
import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxglue.files.regular_file import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded; others of Pillow's, which few use, had bombs of their own."""
MAX_BYTES = 2**27
"""Most bytes of a stored image."""
MAX_PIXELS = 2**27
"""Most pixels of an image: its header is read before it is decoded."""
MAX_RATIO = 200
"""Most times that one side is longer than the other."""
MAX_FRAMES = 768
"""Most frames of a video."""
_PAIR = b"jaxglue: two frames\n"
"""Begins two frames of a video, the first one behind its length."""
_DATA_URL = "data:"
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Most characters that file systems take in a name, and Linux in a path."""
_WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
"""Pillow's modes of more than 8 bits a value, which it would clip."""
_IN_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Pillow's modes that PNG files keep."""
IMAGE_KEYS, AUDIO_KEYS = ("image", "image_url"), ("audio", "audio_url", "input_audio")
COMMON_KEYS = "url", "path", "base64", "bytes", "data"
"""Keys under which parts of messages and rows hold an image, a clip of audio, or either."""
_KEYS = (*IMAGE_KEYS, *AUDIO_KEYS, *COMMON_KEYS)
Kind = Literal["image", "clip", "frame"]
"""Image, clip of audio, or frame of a video."""


class ImageSource(NamedTuple):
    """An image where a row holds it: its bytes, or the file that has them, perhaps inside of a zip file; or a clip."""

    data: bytes = b""
    path: str = ""
    kind: Kind = "image"

    @property
    def file(self) -> Path:
        """Return the file on disk: of `pictures.zip/cat.png` that of the zip file, unless a folder has this name."""
        path = Path(self.path)
        return next((each for each in path.parents if each.suffix.lower() == ".zip" and each.is_file()), path)

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            ValueError: no such file, or more bytes than `MAX_BYTES`.
        """
        if not self.path:
            return self.data
        try:
            with open_regular(self.file) as file:
                data = self._member(file) if self.file != Path(self.path) else file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ValueError(f"{self.kind} {self.path}: {error.strerror or error}") from error
        if len(data) > MAX_BYTES:
            raise ValueError(f"{self.kind} {self.path}: more than {MAX_BYTES:,} bytes: store it smaller")
        return data

    def _member(self, file: IO[bytes]) -> bytes:
        """Return the first bytes of a file inside of a zip file."""
        name = Path(self.path).relative_to(self.file).as_posix()
        try:
            with zipfile.ZipFile(file) as archive, archive.open(name) as member:
                return member.read(MAX_BYTES + 1)
        except KeyError:
            raise ValueError(f"{self.kind} {self.path}: {self.file} has no {name}") from None
        except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError) as error:
            raise ValueError(f"{self.kind} {self.path}: the zip file cannot be read: {error}") from error


def image_source(value: Any, folder: Path | None, kind: Kind = "image") -> ImageSource:
    """Return the image of a row's value: a path, a data URL, base64, bytes, or an object that holds one of them.

    Args:
        value: such as `cat.png`, `{"bytes": …, "path": …}` of `datasets`, `{"url": "data:image/png;base64,…"}`.
        folder: of relative paths; None for values that may name no file.
        kind: of the value; a clip of audio comes in the same forms.

    Raises:
        ValueError: none of these, or an address of the network, which is not read.
    """
    a = "a clip" if kind == "clip" else "an image"
    if isinstance(value, bytes | bytearray):
        return ImageSource(data=_bounded(bytes(value), a), kind=kind)
    if isinstance(value, Mapping):
        if value.get("bytes") and isinstance(value["bytes"], bytes | Mapping):
            return image_source(value["bytes"], folder, kind)
        if isinstance(value.get("base64"), str):
            return ImageSource(data=_decoded(value["base64"], a), kind=kind)
        named = next((value[key] for key in _KEYS if value.get(key) not in (None, "", b"")), None)
        if named is None:
            keys = ", ".join(repr(str(key)[:40]) for key in list(value)[:10])
            raise ValueError(f"{a} needs one of {', '.join(_KEYS)}; its keys are {keys or 'none'}")
        return image_source(named, folder, kind)
    if not isinstance(value, str) or not value:
        found = "an empty text" if value == "" else type(value).__name__
        raise ValueError(f"{a} must be a path, a data: URL or bytes, got {found}")
    if value.startswith(_DATA_URL):
        head, comma, text = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ValueError(f"{value[:40]!r}: a data: URL of {a} ends its head with ;base64,")
        return ImageSource(data=_decoded(text, a), kind=kind)
    if "://" in value[:32] and not value.startswith("file://"):
        raise ValueError(f"{value[:80]!r}: {kind}s are not fetched from the network: download it, and name the file")
    if folder is None:
        raise ValueError(f"{value[:80]!r}: files are not read here: send a data: URL with base64")
    if len(value) > _LONGEST_PATH or len(max(value.split("/"), key=len)) > _LONGEST_NAME:
        raise ValueError(f"{value[:40]!r}… is no path: base64 goes under 'base64', or in a data: URL")
    return ImageSource(path=str(folder / value.removeprefix("file://")), kind=kind)


def _bounded(data: bytes, a: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise ValueError(f"{a} of {len(data):,} bytes: at most {MAX_BYTES:,} are read")
    return data


def _decoded(text: str, a: str) -> bytes:
    if len(text) > MAX_BYTES * 4 // 3:
        raise ValueError(f"{a} of {len(text):,} characters of base64: at most {MAX_BYTES * 4 // 3:,} are read")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also of other than ASCII characters
        raise ValueError(f"{a} in base64 that cannot be decoded: {error}") from error


def join_frames(first: bytes, second: bytes) -> bytes:
    """Return two frames of a video as the bytes of one image."""
    return _PAIR + len(first).to_bytes(8, "big") + first + second


def frames_of(data: bytes) -> list[bytes]:
    """Return the frames of an image: itself, or the two that were joined."""
    if not data.startswith(_PAIR):
        return [data]
    begin = len(_PAIR) + 8
    end = begin + int.from_bytes(data[len(_PAIR) : begin], "big")
    return [data[begin:end], data[end:]]


def animation_frames(data: bytes, rate: float) -> list[bytes]:
    """Return the frames of an animation that are seen at multiples of 1 / `rate` seconds, as PNG files.

    Raises:
        ValueError: no image, one out of bounds, a damaged one, or too many frames.
    """
    image, frames, end, number = _opened(data, MAX_PIXELS), list[bytes](), 0.0, 0
    try:
        while True:
            image.seek(number)
            end += (image.info.get("duration") or 100) / 1000  # viewers show frames of none or 0 for so long
            if len(frames) / rate < end:
                _on_white(image).save(stored := io.BytesIO(), "PNG")
                while len(frames) / rate < end - 1e-9:
                    if len(frames) == MAX_FRAMES:
                        raise ValueError(f"more than {MAX_FRAMES} frames at {rate:g} a second: give a lower 'fps'")
                    frames.append(stored.getvalue())
            number += 1
    except EOFError:
        return frames
    except (OSError, SyntaxError, IndexError, MemoryError) as error:
        raise ValueError(f"a damaged animation: {' '.join(str(error).split())[:200]}") from error


def png_of(image: "Image") -> bytes:
    """Return an image of Pillow as a PNG file, turned as its EXIF data say."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    image = image if image.mode in _IN_PNG else image.convert("RGB")
    image.save(stored := io.BytesIO(), "PNG")
    return stored.getvalue()


def digest_of(data: bytes) -> bytes:
    """Return 16 bytes that stand for an image's bytes."""
    return hashlib.sha256(data).digest()[:16]


def _opened(data: bytes, max_pixels: int) -> "Image":
    """Open an image without decoding it, within the bounds."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(f"too many pixels: at most {max_pixels:,} are read: store it smaller") from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"no image that can be read: expected {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > max_pixels:
        raise ValueError(f"{width} × {height} pixels: at most {max_pixels:,} are read: store it smaller")
    if min(width, height) < 1 or max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"{width} × {height} pixels: one side is more than {MAX_RATIO} times the other: crop it")
    return image


_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)


def image_size(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return (height, width) of an image as it is seen, or of a pair's first frame, from its header.

    Raises:
        ValueError: no image, or one out of bounds.
    """
    image = _opened(frames_of(data)[0], max_pixels)
    width, height = image.size
    return (width, height) if _orientation(image) in _TURNED else (height, width)


def _orientation(image: "Image") -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # of damaged metadata, which Pillow reads by errors of many types; the pixels remain
        return 1


def read_image(data: bytes, max_pixels: int = MAX_PIXELS) -> "Image":
    """Decode an image to 8-bit RGB, turned as its EXIF data say; the first frame of an animated one or a pair.

    What is transparent shows white, as in transformers from 5.24 on.

    Raises:
        ValueError: no image, one out of bounds, or a damaged one.
    """
    from PIL import Image, ImageOps

    image = _opened(frames_of(data)[0], max_pixels)
    turned = _orientation(image) != 1
    try:
        image.load()
        image = ImageOps.exif_transpose(image) if turned else image
        if image.mode in _WIDE:
            values = np.asarray(image)
            values = values / 256 if image.mode.startswith("I;") or values.max(initial=0) > 255 else values
            image = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
        return _on_white(image)
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, MemoryError, Image.DecompressionBombError) as error:
        raise ValueError(f"a damaged image: {' '.join(str(error).split())[:200]}") from error


def thumbnail(data: bytes, side: int = 96) -> str:
    """Return a small copy of an image as a data: URL, for pages.

    Raises:
        ValueError: as `read_image`.
    """
    image = read_image(data)
    image.thumbnail((side, side))
    image.save(stored := io.BytesIO(), "JPEG", quality=80)
    return f"{_DATA_URL}image/jpeg;base64,{base64.b64encode(stored.getvalue()).decode()}"


def _on_white(image: "Image") -> "Image":
    """Return an image in RGB, on white where it is transparent."""
    from PIL import Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        seen = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
    return image if image.mode == "RGB" else image.convert("RGB")
