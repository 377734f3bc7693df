"""Processors: the size to which an image is brought, its patches, and the tokens that stand for it; those of clips."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from jaxglue.files.json_file import read_json
from jaxglue.parts import Registry
from jaxglue.vision.clips import FRAMES, clip_frames, log_mel, read_clip
from jaxglue.vision.images import frames_of, read_image

DEFAULT_TOKENS = 2048
"""Most tokens of an image where no setting names them: model files allow up to 16,384, for which towers take long."""
BICUBIC, BILINEAR = 3, 2
"""Pillow's numbers of its filters."""
_HALF = (0.5, 0.5, 0.5)


class Grid(NamedTuple):
    """Patches of an image, or frames of a clip of audio: as many rows, and no columns."""

    rows: int
    columns: int

    @property
    def is_clip(self) -> bool:
        """Tell whether these are the frames of a clip."""
        return not self.columns

    @property
    def patches(self) -> int:
        """Return the number of patches; of a clip that of its tokens."""
        return -(-self.rows // FRAMES) if self.is_clip else self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """The rule by which clips of audio become frames and tokens."""

    bands: int
    """Mel bands of a frame."""
    token: str = ""
    """Token that stands for a feature of a clip."""
    begin: str = ""
    """Token before a clip's."""
    end: str = ""
    """Token behind them."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], audio: Mapping[str, Any]) -> Self:
        """Return the rule of a feature extractor's settings and an `audio_config`, whose tower reads as many bands.

        Raises:
            ValueError: settings that are not supported.
        """
        channels = audio.get("subsampling_conv_channels")
        bands = channels[0] if isinstance(channels, list) and channels else 128
        for name, value in (_HEARD | {"feature_size": bands}).items():
            if settings.get(name, value) != value:
                raise ValueError(
                    f"processor_config.json: {name} {settings[name]!r:.60} of the feature extractor is not supported: "
                    f"only {value}"
                )
        return cls(bands=bands)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return all tokens of a clip, the one of features first."""
        return tuple(text for text in (self.token, self.begin, self.end) if text)

    def text(self, tokens: int) -> str:
        """Return the text of a clip of so many tokens."""
        return f"{self.begin}{self.token * tokens}{self.end}"

    def grid(self, data: bytes) -> Grid:
        """Return the frames of a clip, which is decoded; raise ValueError as `read_clip`."""
        return Grid(clip_frames(len(read_clip(data))), 0)

    def frames(self, data: bytes) -> Float32[np.ndarray, "n values"]:
        """Return a clip's frames, those of a token side by side, with zeros behind the last one.

        Raises:
            ValueError: as `read_clip`.
        """
        frames = log_mel(read_clip(data), self.bands)
        return np.pad(frames, ((0, -len(frames) % FRAMES), (0, 0))).reshape(-1, FRAMES * self.bands)


_HEARD = {
    **{"sampling_rate": 16_000, "frame_length_ms": 20.0, "hop_length_ms": 10.0, "mel_floor": 1e-3, "dither": 0.0},
    **{"min_frequency": 0.0, "max_frequency": 8000.0, "preemphasis": 0.0, "fft_overdrive": False},
    **{"input_scale_factor": 1.0, "per_bin_mean": None, "per_bin_stddev": None},
}
"""Settings of feature extractors: transformers' defaults."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The rule by which a family's images become patches and tokens.

    Patches lie in the order of the tokens that they are merged to, so that merging is a change of shape.
    """

    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a merged one's side."""
    mean: tuple[float, ...] = _HALF
    std: tuple[float, ...] = _HALF
    resample: int = BICUBIC
    max_tokens: int
    """Most tokens of an image."""
    token: str = ""
    """Token that stands for a feature of an image."""
    begin: str = ""
    """Token before an image's."""
    end: str = ""
    """Token behind them."""
    stand_in: int | None = None
    """Token whose own embeddings the layers of some models have at features; None for the features' token."""
    hearing: Hearing | None = None
    """Rule of clips of audio; None for a model that hears none."""
    pixels: int | None = None
    """Pixels above which an image counts as one that was made smaller; None for none."""
    frame_pixels: int | None = None
    """The same of a video's frame."""

    positions: ClassVar[bool] = False
    """Tokens have positions by time, height and width."""
    channels_last: ClassVar[bool] = False
    """A patch's values are (y, x, channel), not (channel, y, x)."""
    videos: ClassVar[Literal["none", "pairs", "frames"]] = "none"
    """Frames that are read as one image: pairs, or single ones."""
    normalizes: ClassVar[bool] = True
    """Values of pixels are normalized before the model."""
    sizes: ClassVar[frozenset[str]] = frozenset()
    """Names in a file's `size`, if it has one, of which one is there; none where that is not read."""
    default_tokens: ClassVar[int | None] = None
    """Most tokens of an image where no setting bounds it; None for those of the model's files."""
    hears: ClassVar[bool] = False
    """Models with an `audio_config` hear clips, unless images' tokens see later ones: no such model is known."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], raw: Mapping[str, Any], max_tokens: int | None) -> Self:
        """Return the processor of a model.

        Args:
            settings: of its image processor, as its files have them.
            raw: config.json.
            max_tokens: a limit below the files'; None for theirs.
        """
        raise NotImplementedError

    @property
    def spans(self) -> bool:
        """Return whether an image's tokens see later ones of it."""
        return False

    @property
    def mark(self) -> str:
        """Return the text that the chat template writes for an image."""
        return self.token

    def mark_of(self, grid: Grid) -> str:
        """Return the text that the chat template writes for an image or a clip."""
        return self.hearing.token if self.hearing is not None and grid.is_clip else self.mark

    @property
    def around(self) -> tuple[str, ...]:
        """Return further tokens of an image, which are never trained on."""
        return tuple(text for text in (self.begin, self.end) if text)

    @property
    def limits(self) -> dict[str, int | None]:
        """Return the limits of images, as `read_processor` takes them."""
        return {"max_tokens": self.max_tokens, "pixels": self.pixels, "frame_pixels": self.frame_pixels}

    def bounded_grid(self, height: int, width: int, *, is_frame: bool = False) -> Grid:
        """Return the patches of an image, or of a video's frame, of so many pixels, within the bounds of pixels."""
        most = self.frame_pixels if is_frame else self.pixels
        if most is not None and height * width > most:
            shrink = math.sqrt(most / (height * width))
            height, width = (max(1, int(side * shrink)) for side in (height, width))
        return self.frame_grid(height, width) if is_frame else self.grid(height, width)

    def grid(self, height: int, width: int) -> Grid:
        """Return the patches of an image of so many pixels, whatever the bounds of pixels."""
        raise NotImplementedError

    def for_videos(self, settings: Mapping[str, Any]) -> Self:
        """Return the processor with a video processor's settings; raise ValueError for what is not supported."""
        del settings  # frames are images to most
        return self

    def frame_grid(self, height: int, width: int) -> Grid:
        """Return the patches of a video's frame of so many pixels."""
        return self.grid(height, width)

    def tokens(self, grid: Grid) -> int:
        """Return the features of an image or a clip, each of which is a token's embedding."""
        return grid.patches // self.merged(grid)

    def merged(self, grid: Grid) -> int:
        """Return the patches of a feature."""
        return 1 if grid.is_clip else self.merge**2

    def text(self, grid: Grid) -> str:
        """Return the text that stands in the place of `mark`."""
        return self.token * self.tokens(grid)

    def marked_text(self, grid: Grid) -> str:
        """Return an image's text with the marks around it, where no template writes these."""
        text = self.text(grid)
        return text if grid.is_clip or self.begin in text else f"{self.begin}{text}{self.end}"

    def patches(self, data: bytes, grid: Grid) -> UInt8[np.ndarray, "P C"] | Float32[np.ndarray, "P C"]:
        """Decode an image, bring it to the size of its patches, and cut it; of a pair of frames each.

        Of a clip: see `Hearing.frames`.

        Raises:
            ValueError: as `read_image` and `read_clip`.
        """
        if self.hearing is not None and grid.is_clip:
            return self.hearing.frames(data)
        frames = [self._cut(frame, grid) for frame in frames_of(data)]
        return frames[0] if len(frames) == 1 else np.concatenate(frames, axis=1)

    def _cut(self, data: bytes, grid: Grid) -> UInt8[np.ndarray, "P C"]:
        p, m = self.patch, self.merge
        image = read_image(data).resize((grid.columns * p, grid.rows * p), self.resample)
        pixels = np.asarray(image).reshape(grid.rows // m, m, p, grid.columns // m, m, p, 3)
        order = (0, 3, 1, 4, 2, 5, 6) if self.channels_last else (0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(pixels.transpose(order)).reshape(grid.patches, 3 * p * p)

    def places(self, grid: Grid) -> Int32[np.ndarray, "P 4"]:
        """Return row and column of each patch, and the rows and columns of its image.

        Of a clip: the number of each token and of its frames, then ones.
        """
        if grid.is_clip:
            number = np.arange(grid.patches, dtype=np.int32)
            ones = np.ones_like(number)
            return np.stack([number, np.minimum(grid.rows - FRAMES * number, FRAMES), ones, ones], axis=1)
        m = self.merge
        rows, columns = np.indices((grid.rows, grid.columns), np.int32)
        blocks = (np.stack([rows, columns], -1)).reshape(grid.rows // m, m, grid.columns // m, m, 2)
        places = blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
        return np.concatenate([places, np.broadcast_to(np.array(grid, np.int32), places.shape)], axis=1)

    @property
    def key(self) -> str:
        """Return a text that tells processors apart by the patches and tokens that they make."""
        return repr(self)


PROCESSORS = Registry[type[Processor]]("image processor")
"""Processors by the `model_type` of the models around a text model."""


def read_processor(
    folder: Path,
    raw: Mapping[str, Any],
    max_tokens: int | None = None,
    *,
    pixels: int | None = None,
    frame_pixels: int | None = None,
) -> Processor | None:
    """Return the processor of a model folder, without its tokens' texts; None for a model that sees no images.

    Args:
        folder: of the model.
        raw: config.json.
        max_tokens: a limit of tokens an image; None for the default, or for the files' where images have `pixels`.
        pixels: of an image, at most, before it is brought to the model's sizes; None for no such limit.
        frame_pixels: of a video's frame.

    Raises:
        ValueError: settings that cannot be read, or a limit that is too low.
    """
    model_type = raw.get("model_type")
    if (
        not isinstance(model_type, str)
        or model_type not in PROCESSORS
        or not isinstance(raw.get("vision_config"), Mapping)
    ):
        return None
    kind = PROCESSORS[model_type]
    max_tokens = kind.default_tokens if max_tokens is None and pixels is None else max_tokens
    processor = kind.of(_image_settings(folder, kind), raw, max_tokens).for_videos(_settings(folder, "video_processor"))
    processor = replace(processor, pixels=pixels, frame_pixels=frame_pixels)
    if not processor.hears or processor.spans or not isinstance(raw.get("audio_config"), Mapping):
        return processor
    return replace(processor, hearing=Hearing.of(_settings(folder, "feature_extractor"), raw["audio_config"]))


def _image_settings(folder: Path, kind: type[Processor]) -> Mapping[str, Any]:
    """Return the settings of a folder's image processor; raise ValueError for those of another kind."""
    settings = _settings(folder, "image_processor")
    steps = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": kind.normalizes}
    for name, value in steps.items():
        if settings.get(name, value) not in (value, None):
            raise ValueError(
                f"{folder}: {name} {settings[name]!r:.60} of the image processor is not supported: only {value}"
            )
    size = {} if settings.get("size") is None else settings["size"]
    if kind.sizes and (not isinstance(size, Mapping) or (size and not size.keys() & kind.sizes)):
        raise ValueError(
            f"{folder}: the image processor's size {size!r:.80} has none of {', '.join(sorted(kind.sizes))}, by which "
            "images of this model are resized: take preprocessor_config.json of the model itself"
        )
    sides = {f"size.{name}": size[name] for name in ("shortest_edge", "longest_edge") if kind.sizes and name in size}
    for name, value in {**settings, **sides}.items():
        is_read = _READ.get(name)
        if value is not None and is_read is not None and not is_read(value):
            raise ValueError(f"{folder}: {name} {value!r:.60} of the image processor cannot be used")
    return settings


def _is_pixels(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _are_colors(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(x, int | float) and x > least for x in value)


_READ: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("min_pixels", "max_pixels", "size.shortest_edge", "size.longest_edge"), _is_pixels),
    **{"image_mean": _are_colors, "image_std": partial(_are_colors, least=0)},
    "resample": lambda value: value in range(6),
}
"""Tell whether values of settings can be used."""

_SETTINGS_FILES = {"video_processor": ("video_preprocessor_config.json",)}
"""Files of one kind of processor, which come before preprocessor_config.json."""


def _settings(folder: Path, kind: str) -> Mapping[str, Any]:
    """Return the settings of a folder's processor of a kind: those beside other processors' come first."""
    for name in ("processor_config.json", *_SETTINGS_FILES.get(kind, ()), "preprocessor_config.json"):
        if (folder / name).is_file():
            raw = read_json(folder / name)
            settings = raw.get(kind) if name == "processor_config.json" else raw
            if isinstance(settings, Mapping):
                return settings
    return {}


def with_texts(processor: Processor, raw: Mapping[str, Any], text_of: Any) -> Processor | None:
    """Return a processor with its tokens' texts; None where the tokenizer has no token for images.

    Args:
        processor: of the model.
        raw: config.json, which has the tokens' ids.
        text_of: returns the text of a token's id.
    """

    def text(names: Sequence[str]) -> str:
        ids = (raw[name] for name in names if isinstance(raw.get(name), int))
        return next((text_of(token) or "" for token in ids), "")

    token = text(("image_token_id", "image_token_index"))
    if not token:
        return None
    begin = text(("vision_start_token_id", "boi_token_id", "boi_token_index"))
    end = text(("vision_end_token_id", "eoi_token_id", "eoi_token_index"))
    seeing, hearing = replace(processor, token=token, begin=begin, end=end), processor.hearing
    if hearing is None:
        return seeing
    begin, end = text(("boa_token_id",)), text(("eoa_token_id", "eoa_token_index"))
    hearing = replace(hearing, token=text(("audio_token_id",)), begin=begin, end=end)
    return replace(seeing, hearing=hearing if hearing.token else None)


@dataclass(frozen=True, kw_only=True)
class AreaProcessor(Processor):
    """Qwen's: sides are multiples of a merged patch, and the pixels within bounds, with about the image's ratio."""

    min_pixels: int
    max_pixels: int
    positions = True
    videos = "pairs"
    sizes = frozenset({"longest_edge", "max_pixels"})
    default_tokens = DEFAULT_TOKENS

    @classmethod
    def of(cls, settings: Mapping[str, Any], raw: Mapping[str, Any], max_tokens: int | None) -> Self:
        """See `Processor`."""
        vision = raw["vision_config"]
        patch, merge = vision.get("patch_size", 16), vision.get("spatial_merge_size", 2)
        area = (patch * merge) ** 2
        size = settings.get("size") or {}
        least = settings.get("min_pixels") or size.get("shortest_edge") or 65_536
        most = settings.get("max_pixels") or size.get("longest_edge") or 16_777_216
        if max_tokens is not None:
            most = min(most, max_tokens * area)
        tokens = most // area
        if tokens < 4:
            raise ValueError(f"--image-max-tokens {tokens}: an image of this model takes at least 4 tokens")
        return cls(
            patch=patch,
            merge=merge,
            mean=tuple(settings.get("image_mean") or _HALF),
            std=tuple(settings.get("image_std") or _HALF),
            resample=BICUBIC if settings.get("resample") is None else settings["resample"],
            max_tokens=tokens,
            min_pixels=min(least, most),
            max_pixels=most,
        )

    def grid(self, height: int, width: int) -> Grid:
        """See `Processor`."""
        f = self.patch * self.merge
        h, w = round(height / f) * f, round(width / f) * f
        if h * w < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            h, w = (math.ceil(side * grow / f) * f for side in (height, width))
        if h * w > self.max_pixels:  # or grown above a limit that is near the least
            shrink = math.sqrt(height * width / self.max_pixels)
            h, w = (max(f, math.floor(side / shrink / f) * f) for side in (height, width))
            h, w = (min(side, self.max_tokens * f) for side in (h, w))  # where the other one is a single patch
        return Grid(h // self.patch, w // self.patch)

    def frame_grid(self, height: int, width: int) -> Grid:
        """See `Processor`; a frame that was made smaller does not grow to an image's least size."""
        least = self.min_pixels if self.frame_pixels is None else min(self.min_pixels, self.frame_pixels)
        return replace(self, min_pixels=least).grid(height, width)


for _model_type in ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"):
    PROCESSORS.add(_model_type, AreaProcessor)


@dataclass(frozen=True, kw_only=True)
class SquareProcessor(Processor):
    """Gemma 3's: every image becomes a square of one size, and as many tokens."""

    side: int
    """Patches of the square's side."""
    sizes = frozenset({"height"})

    @classmethod
    def of(cls, settings: Mapping[str, Any], raw: Mapping[str, Any], max_tokens: int | None) -> Self:
        """See `Processor`."""
        vision, tokens = raw["vision_config"], raw.get("mm_tokens_per_image") or 256
        side = vision.get("image_size", 896) // vision.get("patch_size", 14)
        if max_tokens is not None and max_tokens < tokens:
            raise ValueError(f"--image-max-tokens {max_tokens}: every image of this model takes {tokens} tokens")
        if settings.get("do_pan_and_scan"):
            raise ValueError("preprocessor_config.json: do_pan_and_scan is not supported: set it to false")
        return cls(
            patch=vision.get("patch_size", 14),
            merge=side // int(tokens**0.5),
            mean=tuple(settings.get("image_mean") or _HALF),
            std=tuple(settings.get("image_std") or _HALF),
            resample=BILINEAR if settings.get("resample") is None else settings["resample"],
            max_tokens=tokens,
            side=side,
        )

    @property
    def spans(self) -> bool:
        """See `Processor`."""
        return True

    @property
    def mark(self) -> str:
        """See `Processor`."""
        return self.begin

    def grid(self, height: int, width: int) -> Grid:
        """See `Processor`."""
        return Grid(self.side, self.side)

    def text(self, grid: Grid) -> str:
        """See `Processor`."""
        return f"\n\n{self.begin}{self.token * self.tokens(grid)}{self.end}\n\n"


IMAGE_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class EdgeProcessor(Processor):
    """Mistral 3's: a side above a limit shrinks, sides grow to whole merged patches, and tokens end rows of them."""

    longest: int
    """Pixels of a side, at most."""
    sizes = frozenset({"longest_edge"})
    default_tokens = DEFAULT_TOKENS

    @classmethod
    def of(cls, settings: Mapping[str, Any], raw: Mapping[str, Any], max_tokens: int | None) -> Self:
        """See `Processor`."""
        patch, merge = raw["vision_config"].get("patch_size", 14), raw.get("spatial_merge_size") or 2
        unit = patch * merge
        longest = (settings.get("size") or {}).get("longest_edge") or 1540
        side = -(-longest // unit)
        tokens = side * (side + 1) if max_tokens is None else max_tokens
        within = unit * int(math.sqrt(tokens + 0.25) - 0.5)  # with a token behind each row
        if within < 2 * unit:
            raise ValueError(f"--image-max-tokens {tokens}: an image of this model takes at least 6 tokens")
        return cls(
            patch=patch,
            merge=merge,
            mean=tuple(settings.get("image_mean") or _CLIP_MEAN),
            std=tuple(settings.get("image_std") or _CLIP_STD),
            resample=BICUBIC if settings.get("resample") is None else settings["resample"],
            max_tokens=tokens,
            longest=min(longest, within),
        )

    @property
    def around(self) -> tuple[str, ...]:
        """See `Processor`."""
        return IMAGE_BREAK, _END

    def grid(self, height: int, width: int) -> Grid:
        """See `Processor`."""
        unit, ratio = self.patch * self.merge, max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = (math.floor(side / ratio) for side in (height, width))
        rows, columns = ((max(side, 1) - 1) // unit + 1 for side in (height, width))
        return Grid(rows * self.merge, columns * self.merge)

    def text(self, grid: Grid) -> str:
        """See `Processor`."""
        rows, columns = grid.rows // self.merge, grid.columns // self.merge
        return IMAGE_BREAK.join([self.token * columns] * rows) + _END


_BUDGETS = 70, 140, 280, 560, 1120


@dataclass(frozen=True, kw_only=True)
class BudgetProcessor(Processor):
    """Gemma 4's: as large, with about the image's ratio, as one of five numbers of tokens allows."""

    bidirectional: bool
    """An image's tokens see later ones of it."""
    frame_tokens: int = _BUDGETS[0]
    """Most tokens of a video's frame."""
    channels_last = True
    videos = "frames"
    normalizes = False
    hears = True

    @classmethod
    def of(cls, settings: Mapping[str, Any], raw: Mapping[str, Any], max_tokens: int | None) -> Self:
        """See `Processor`; a limit chooses the largest number below, which may be above the files'."""
        vision, text = raw["vision_config"], raw.get("text_config") or {}
        budget = settings.get("max_soft_tokens") or 280
        if max_tokens is not None:
            budget = max((number for number in _BUDGETS if number <= max_tokens), default=None)
        if budget not in _BUDGETS:
            given = f"--image-max-tokens {max_tokens}" if max_tokens is not None else f"max_soft_tokens {budget!r:.60}"
            raise ValueError(f"{given}: images of this model take {', '.join(map(str, _BUDGETS))} tokens at most")
        patch, merge = vision.get("patch_size", 16), vision.get("pooling_kernel_size", 3)
        return cls(
            patch=patch,
            merge=merge,
            resample=BICUBIC if settings.get("resample") is None else settings["resample"],
            max_tokens=budget,
            bidirectional=text.get("use_bidirectional_attention") == "vision",
            stand_in=text.get("pad_token_id") or 0,
        )

    @property
    def spans(self) -> bool:
        """See `Processor`."""
        return self.bidirectional

    def grid(self, height: int, width: int) -> Grid:
        """See `Processor`."""
        return self._grid(height, width, self.max_tokens)

    def frame_grid(self, height: int, width: int) -> Grid:
        """See `Processor`."""
        return self._grid(height, width, self.frame_tokens)

    def for_videos(self, settings: Mapping[str, Any]) -> Self:
        """See `Processor`; frames have a budget of their own, as far as that of images allows."""
        budget = settings.get("max_soft_tokens")
        budget = _BUDGETS[0] if budget is None else budget
        if budget not in _BUDGETS:
            raise ValueError(
                f"max_soft_tokens {budget!r:.60}: frames take {', '.join(map(str, _BUDGETS))} tokens at most"
            )
        return replace(self, frame_tokens=min(budget, self.max_tokens))

    def _grid(self, height: int, width: int, most: int) -> Grid:
        """Return the patches of an image within a number of tokens."""
        unit = self.patch * self.merge
        factor = math.sqrt(most * unit**2 / (height * width))
        rows, columns = (math.floor(factor * side / unit) for side in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, most)
        elif columns == 0:
            rows, columns = min(height // width, most), 1
        return Grid(rows * self.merge, columns * self.merge)

    def text(self, grid: Grid) -> str:
        """See `Processor`."""
        if self.hearing is not None and grid.is_clip:
            return self.hearing.text(self.tokens(grid))
        return f"{self.begin}{self.token * self.tokens(grid)}{self.end}"


@dataclass(frozen=True, kw_only=True)
class LargePatchProcessor(BudgetProcessor):
    """Gemma 4 12B's: as Gemma 4's, and merged patches are read as they are."""

    hears = False

    @classmethod
    def of(cls, settings: Mapping[str, Any], raw: Mapping[str, Any], max_tokens: int | None) -> Self:
        """See `BudgetProcessor`."""
        found = super().of(settings, raw, max_tokens)
        return replace(found, patch=found.patch * found.merge, merge=1)


PROCESSORS.add("gemma4", BudgetProcessor)
PROCESSORS.add("gemma4_unified", LargePatchProcessor)
PROCESSORS.add("gemma3", SquareProcessor)
PROCESSORS.add("mistral3", EdgeProcessor)
