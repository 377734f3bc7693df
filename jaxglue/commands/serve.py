"""Serve a model over OpenAI's HTTP interface: `jaxglue serve --adapter runs/first/adapter`."""

import importlib.util
import os
import sys
from typing import Any

from jaxglue.commands.interrupts import STATUS
from jaxglue.serve.config import ServeConfig
from jaxglue.terminal.lines import echo


def main(config: ServeConfig) -> None:
    """Load the model and answer requests until Ctrl-C, or SIGTERM, after which requests have 5 s to end.

    Raises:
        ValueError: starlette or uvicorn is not installed, or bad folders, tensors or tokenizer.
    """
    if missing := [
        name for name in ("starlette", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None
    ]:
        raise ValueError(f"jaxglue serve needs {' and '.join(missing)}: pip install '.[serve]' in its clone")
    import uvicorn

    from jaxglue.generation.assistant import Assistant
    from jaxglue.serve.connections import bounded_protocol
    from jaxglue.serve.server import make_app
    from jaxglue.serve.service import Service

    assistant = Assistant(config)
    limits: dict[str, Any] = {"slots": config.batch_size, "length": config.max_length, "most": config.max_requests}
    service = Service(assistant, **limits, memory=assistant.memory)
    if service.length < (longest := assistant.config.max_generated_positions):
        echo(f"texts may have {service.length:,} tokens, of the model's {longest:,} (--max-length)", error=True)
    try:
        echo("compiling the programs", error=True)
        service.warm_up()
        names = ", ".join([config.served_name, *config.named_adapters])
        echo(f"serving {names} at http://{config.host}:{config.port}/v1", error=True)
        app = make_app(assistant, service, config)
        connections: Any = {
            "http": bounded_protocol(),
            "log_level": "warning",
            "access_log": False,
            "timeout_graceful_shutdown": 5,
        }
        uvicorn.Server(uvicorn.Config(app, host=config.host, port=config.port, **connections)).run()
    except KeyboardInterrupt:
        echo("jaxglue serve: interrupted", error=True)
        sys.stdout.flush()
        os._exit(STATUS)  # threads that compile would go on for minutes, or abort the process as it ends
    finally:
        service.close()
