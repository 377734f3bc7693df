"""Talk with a model in the terminal: `jaxglue chat --adapter runs/first/adapter`."""

import contextlib
from pathlib import Path

from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import AnsweringConfig
from jaxglue.serve.chat import HELP, ChatSession, converse
from jaxglue.terminal.lines import echo


def main(config: AnsweringConfig) -> None:
    """Load the model once and answer until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  edits lines and recalls earlier ones
    session = ChatSession(Assistant(config, stays=True, images=Path()), config.sampling, config.system)
    echo(HELP)
    converse(session, input, lambda text: echo(text, end=""))
