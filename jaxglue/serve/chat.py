"""Chat with a model: a conversation in the terminal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxglue.data.messages import Chat
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.prompts import system_message
from jaxglue.text.stream import TAGS

HELP = """/reset forgets the conversation · /system TEXT sets the system message · /image FILE shows a picture
Ctrl-C stops an answer · Ctrl-D leaves"""
_FINAL = "<|channel|>final<|message|>"
"""Start of the answer proper in the harmony format; its template takes no other channel back."""


class ChatSession:
    """Messages so far, answered by one loaded model."""

    def __init__(self, assistant: Assistant, sampling: SamplingConfig, system: str | None = None):
        self._assistant, self._sampling, self._system = assistant, sampling, system
        self.messages: list[dict[str, Any]] = []
        self._images, self._waiting = list[str](), list[str]()

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces, and remember it, or as much of it as came before an interruption.

        Raises:
            ValueError: the conversation is too long, or the template refuses it; the question is forgotten.
        """
        images, shown = [*self._images, *self._waiting], [{"type": "image"}] * len(self._waiting)
        content: Any = [*shown, {"type": "text", "text": text}] if shown else text
        asked, self._waiting = [*self.messages, {"role": "user", "content": content}], []
        messages = [*system_message(self._system), *asked]
        prompt = self._assistant.encode(Chat(messages, None, [], tuple(images)))
        pieces: list[str] = []
        try:
            for piece in self._assistant.answer(prompt.tokens, self._sampling, images=prompt.images):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages = [*asked, {"role": "assistant", "content": _said("".join(pieces))}]
                self._images = images

    def command(self, line: str) -> str:
        """Run a command that begins with a slash; return what to show."""
        name, _, text = line.partition(" ")
        if name == "/reset":
            self._forget()
            return "the conversation is forgotten"
        if name == "/image":
            if self._assistant.sight is None:
                return "this model sees no images"
            if not Path(text.strip()).is_file():
                return f"no such file: {text.strip()}"
            self._waiting.append(str(Path(text.strip())))
            return f"{len(self._waiting)} to be shown with the next message"
        if name == "/system":
            self._system = text.strip() or None
            self._forget()
            return f"system message: {self._system or 'none'}; the conversation begins anew"
        return HELP if name == "/help" else f"unknown command {name}\n{HELP}"

    def _forget(self) -> None:
        self.messages, self._images, self._waiting = [], [], []


def _said(text: str) -> str:
    """Return an answer without thinking that chat templates do not take back."""
    for begin in (_FINAL, *(tags.end for tags in TAGS[1:])):
        text = text.rpartition(begin)[2]
    return text


def converse(session: ChatSession, read: Callable[[str], str], write: Callable[[str], None]) -> None:
    """Read lines and write answers until the input ends.

    Args:
        session: of the model.
        read: returns a line after a prompt; EOFError ends the conversation, KeyboardInterrupt drops the line.
        write: shows text without adding a newline.
    """
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")
            continue
        if line.startswith("/"):
            write(session.command(line) + "\n")
        elif line:
            _answer(session, line, write)


def _answer(session: ChatSession, line: str, write: Callable[[str], None]) -> None:
    pieces = session.ask(line)
    try:
        for piece in pieces:
            write(piece)
    except KeyboardInterrupt:
        write(" [stopped]")
    except ValueError as error:
        write(f"{error}: /reset begins anew")
    finally:
        pieces.close()  # type: ignore[attr-defined]
    write("\n")
