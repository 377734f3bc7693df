"""What endpoints answer with: a loaded model, the thread that decodes, settings and names."""

from dataclasses import dataclass, field
from itertools import count

from jaxglue.generation.assistant import Assistant
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.served_models import ServedModels
from jaxglue.serve.service import Service


@dataclass(frozen=True)
class Host:
    """A server's state, which every endpoint gets."""

    assistant: Assistant
    service: Service
    config: ServeConfig
    models: ServedModels
    seeds: count = field(default_factory=lambda: count(1))
    """Seeds of requests that state none."""
