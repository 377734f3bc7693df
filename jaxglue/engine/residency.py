"""Places of the layers' frozen weights: on the device, or streamed from pinned host memory or from their files."""

from jaxglue.engine.layer_settings import AUTO, LayerSettings, spread

DEVICE, HOST, MAPPED = "device", "host", "mapped"
PLACES = (DEVICE, HOST, MAPPED)


def _parse_place(text: str) -> str:
    if text not in PLACES:
        raise ValueError(
            f"weights {text!r:.200} is unknown: use {', '.join(PLACES)} or {AUTO}, or counts such as "
            "20 x device & 12 x host"
        )
    return text


_SETTINGS = LayerSettings(flag="weights", item="PLACE", parse=_parse_place)


def parse_weights(text: str, layers: int) -> tuple[str, ...]:
    """Parse the place of each layer's weights: `device`, `host`, `mapped`, or counts as in `20 x device & 12 x host`.

    `host` or `mapped` alone keeps the first layer's on the device, since nothing runs before it to hide their copy.

    Raises:
        ValueError: an unknown place, or counts that do not sum to the number of layers.
    """
    if text in (HOST, MAPPED):
        return stream_evenly(layers, layers - 1, mapped=layers - 1 if text == MAPPED else 0)
    return _SETTINGS.read(text, layers)


def check_weights(text: str) -> None:
    """Raise ValueError for text that is neither `auto` nor valid for `parse_weights`."""
    _SETTINGS.check(text)


def format_weights(places: tuple[str, ...]) -> str:
    """Format places so that `parse_weights` reads them."""
    alone = (text for text in PLACES if parse_weights(text, len(places)) == places)
    return next(alone, None) or _SETTINGS.write(places)


def stream_evenly(layers: int, count: int, mapped: int = 0) -> tuple[str, ...]:
    """Return the places of layers of which `count` are streamed, spread evenly for a steady load of the link.

    The first layer's weights stay on the device. `mapped` of those streamed come from their files.
    """
    count = min(count, layers - 1)
    mapped = min(mapped, count)
    return spread([(DEVICE, layers - count), (HOST, count - mapped), (MAPPED, mapped)])


def is_streamed(places: tuple[str, ...]) -> bool:
    """Return whether any layer's weights are streamed."""
    return any(residence != DEVICE for residence in places)
