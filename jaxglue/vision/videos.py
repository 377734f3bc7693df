"""Videos of rows: frames of a list, a folder or an animation, one by one, or in pairs that are read as one image."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxglue.vision.images import MAX_FRAMES, ImageSource, animation_frames, image_source, join_frames

VIDEO_KEYS = ("video", "video_url", "url", "path")
"""Keys of a part of a message under which its video may be."""
_FRAMES_PER_SECOND = 2.0
"""Of lists and folders whose part names no `fps`, and of animations, from which as many are taken."""
_TIME = "\U000f0002"
"""Mark around a frame's time in a message: templates cut spaces off texts, and `with_spaces` brings them back."""
_TIMED = re.compile(f"{_TIME}({_TIME})?(\\d+:\\d\\d){_TIME}")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


def frame_pairs(video: Mapping[str, Any], folder: Path | None) -> list[tuple[str, ImageSource]]:
    """Return the pairs of frames of a video, each with the text of its time; an odd last frame is twice.

    Arguments and errors as of `video_frames`.
    """
    frames = video_frames(video, folder)
    frames += frames[-1:] * (len(frames) % 2)
    return [
        (f"<{(first + second) / 2:.1f} seconds>", ImageSource(data=join_frames(a, b)))
        for (first, a), (second, b) in zip(frames[::2], frames[1::2], strict=True)
    ]


def timed_frames(video: Mapping[str, Any], folder: Path | None) -> list[tuple[str, ImageSource]]:
    """Return the frames of a video, each behind the minutes and seconds of its time, to be read by `with_spaces`.

    Arguments and errors as of `video_frames`.
    """
    return [
        (
            f"{_TIME * (1 + (number > 0))}{int(time // 60):02d}:{int(time % 60):02d}{_TIME}",
            ImageSource(data=frame, kind="frame"),
        )
        for number, (time, frame) in enumerate(video_frames(video, folder))
    ]


def with_spaces(text: str) -> str:
    """Return a text with the times of `timed_frames` between spaces, but for one before a video's first."""
    return _TIMED.sub(lambda found: f"{' ' if found[1] else ''}{found[2]} ", text)


def video_frames(video: Mapping[str, Any], folder: Path | None) -> list[tuple[float, bytes]]:
    """Return the frames of a part of a message, with their times in seconds.

    Args:
        video: `video`, a list of images, a folder of them in the order of their names, or an animation; or `video_url`,
            `url` or `path`, of an animation or of frames as vLLM takes them, JPEG files in base64 with commas between;
            and perhaps `fps`, frames per second.
        folder: of relative paths; None where no files are named.

    Raises:
        ValueError: none of these, no frame or too many, or as `image_source` and `ImageSource.read`.
    """
    rate, value = video.get("fps"), _value(video)
    rate = _FRAMES_PER_SECOND if rate is None else rate
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1000:
        raise ValueError(f"'fps' of a video must be a number of frames per second, got {rate!r:.40}")
    names_file = folder is not None and isinstance(value, str) and not value.startswith("data:")
    if names_file and (named := folder / value.removeprefix("file://")).is_dir():
        value = [str(path) for path in sorted(named.iterdir()) if path.suffix.lower() in _SUFFIXES]
    if isinstance(value, list):
        if len(value) > MAX_FRAMES:
            raise ValueError(f"a video of {len(value):,} frames: at most {MAX_FRAMES} are read")
        frames = [image_source(each, folder).read() for each in value]
    elif value is None:
        raise ValueError("a part of type 'video' needs 'video': a list of images, a folder of them, or an animation")
    else:
        frames = animation_frames(image_source(value, folder).read(), rate)
    if not frames:
        raise ValueError("a video without frames")
    return [(number / rate, frame) for number, frame in enumerate(frames)]


def _value(video: Mapping[str, Any]) -> Any:
    """Return what a part of a message says its video is."""
    value = next((video[key] for key in VIDEO_KEYS if video.get(key) not in (None, "")), None)
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    if not isinstance(value, str) or not value.startswith("data:video/"):
        return value
    kind, _, frames = value.partition(";base64,")
    if kind != "data:video/jpeg":
        raise ValueError(
            f"{kind[:40]!r}: no program decodes videos here: send frames, as data:video/jpeg;base64 with commas "
            "between, a list of images, or a GIF"
        )
    return [{"base64": frame} for frame in frames.split(",")]
