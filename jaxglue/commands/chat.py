"""Talk with a model in the terminal: `jaxglue chat --adapter runs/first/adapter`."""

import contextlib
from collections.abc import Sequence

from jaxglue.cli import parse_config
from jaxglue.generation.chat import Assistant, AssistantConfig
from jaxglue.generation.session import HELP, Session, converse


def main(argv: Sequence[str] | None = None) -> None:
    """Load the model once and answer until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  edits lines and recalls earlier ones
    config = parse_config(AssistantConfig, argv, command="chat")
    session = Session(Assistant(config), config.sampling, config.system)
    print(HELP)
    converse(session, input, lambda text: print(text, end="", flush=True))
