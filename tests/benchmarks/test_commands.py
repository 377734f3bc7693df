"""Commands that the documentation records for machines with GPUs are read by their scripts."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SECTION = re.compile(r"## Not measured yet\n(.*?)\n## ", re.DOTALL)
_SCRIPT = re.compile(r"`((?:peers/)?\w+\.py[^`]*)`")


class ReadError(Exception):
    """Flags were read: nothing more need run."""


def commands() -> list[str]:
    """Return the commands of benchmarks that have not been run."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (section,) = _SECTION.findall(text)
    return _SCRIPT.findall(section)


def test_commands_that_wait_for_a_gpu_are_read(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def read(parser: argparse.ArgumentParser, *arguments: object) -> None:
        parse(parser, *arguments)
        raise ReadError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers"), *sys.path])
    found = commands()
    assert found
    for command in found:
        script, *flags = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [script, *flags])
        with pytest.raises(ReadError):
            runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
