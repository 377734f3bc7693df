"""Talk with a model in the terminal: `jaxglue chat --adapter runs/first/adapter`."""

import contextlib

from jaxglue.generation.chat import HELP, Assistant, Session, converse
from jaxglue.generation.config import AssistantConfig


def main(config: AssistantConfig) -> None:
    """Load the model once and answer until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  edits lines and recalls earlier ones
    session = Session(Assistant(config), config.sampling, config.system)
    print(HELP)
    converse(session, input, lambda text: print(text, end="", flush=True))
