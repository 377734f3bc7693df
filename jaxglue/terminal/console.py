"""rich's console for texts of strangers."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from jaxglue.terminal.lines import visible


class Console(rich.console.Console):
    """Console on which only `style` arguments style: brackets are text, and control characters visible."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text of the visible characters."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of anything that is printed, with their characters visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
