"""What is printed: no markup, no control characters."""

import io

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxglue.data.progress import DataProgress
from jaxglue.terminal.console import Console
from jaxglue.terminal.lines import echo, fold, visible

HOSTILE = "mk[/red]2 \x1b[2J \x9b31m \u202eabc :smile:"
SHOWN = "mk[/red]2 \\x1b[2J \\x9b31m \\u202eabc :smile:"


@pytest.mark.parametrize("wrap", [str, Text, lambda text: Panel(Text(text)), lambda text: _table(text)])
def test_a_console_prints_texts_as_they_are(wrap):
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="truecolor")
    console.print(wrap(HOSTILE))
    assert SHOWN in console.file.getvalue()


def _table(text):
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    return table


def test_a_stage_with_markup_in_its_name_is_shown():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with DataProgress(console).stage("hashing ca[/red]che\x1b[2J", 5.0) as advance:
        advance(3.0)
    assert "hashing ca[/red]che\\x1b[2J" in console.file.getvalue()


def test_lines_are_printed_with_control_characters_visible(capsys):
    echo(HOSTILE)
    echo(HOSTILE, end="", error=True)
    assert capsys.readouterr() == (f"{SHOWN}\n", SHOWN)
    assert fold(HOSTILE) == SHOWN
    assert visible("a\tb\nç 漢 😀") == "a\tb\nç 漢 😀"
