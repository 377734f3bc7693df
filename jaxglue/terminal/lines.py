"""Lines for the terminal, with control characters of strangers' texts made visible."""

import re
import shutil
import sys
import textwrap

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All control characters but tabs and ends of lines, and those that reverse a text's direction."""


def visible(text: str) -> str:
    """Return a text with its control characters as escapes: names and contents of files would steer the terminal."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def echo(text: object = "", *, end: str = "\n", error: bool = False) -> None:
    """Print a text at once, to standard error if it is an `error` or progress."""
    print(visible(str(text)), end=end, file=sys.stderr if error else sys.stdout, flush=True)


def fold(text: str) -> str:
    """Break a message between words where standard error is a terminal, to lines as long as that is wide."""
    if not sys.stderr.isatty():
        return visible(text)
    width = shutil.get_terminal_size().columns
    return textwrap.fill(visible(text), width, replace_whitespace=False, break_long_words=False, break_on_hyphens=False)
