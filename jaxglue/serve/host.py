"""What endpoints answer with: a loaded model, the threads that decode and read, settings and names."""

from dataclasses import dataclass, field
from itertools import count

from jaxglue.generation.assistant import Assistant
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.reading import ReadService
from jaxglue.serve.served_models import ServedModels
from jaxglue.serve.service import Service


@dataclass(frozen=True)
class Host:
    """A server's state, which every endpoint gets; forms are served whose parts are there."""

    text: tuple[Assistant, Service] | None
    """The model that writes text, and its thread; None for one that does not."""
    reader: ReadService | None
    """The thread that answers in one pass; None without."""
    config: ServeConfig
    models: ServedModels
    seeds: count = field(default_factory=lambda: count(1))
    """Seeds of requests that state none."""

    @property
    def assistant(self) -> Assistant:
        """Return the model that writes text."""
        assert self.text is not None
        return self.text[0]

    @property
    def service(self) -> Service:
        """Return the thread that decodes."""
        assert self.text is not None
        return self.text[1]

    @property
    def reading(self) -> ReadService:
        """Return the thread that reads."""
        assert self.reader is not None
        return self.reader

    @property
    def failure(self) -> str | None:
        """Return the reason for a thread's end; None while all run."""
        threads = [self.text and self.text[1], self.reader]
        return next((thread.failure for thread in threads if thread and thread.failure), None)

    @property
    def length(self) -> int:
        """Return the most tokens of a text."""
        return self.service.length if self.text else self.reading.length

    @property
    def kinds(self) -> frozenset[str]:
        """Return what the model is for."""
        return frozenset([*(["text"] if self.text else []), *(self.reader.readers if self.reader else ())])
