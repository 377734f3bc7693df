"""Serve a model over OpenAI's HTTP interface: `jaxglue serve --adapter runs/first/adapter`."""

import importlib.util
import os
import sys
from typing import Any

from jaxglue.commands.devices import dispatch_far_ahead
from jaxglue.commands.interrupts import STATUS
from jaxglue.engine.garbage_collection import leave_out_what_lives_on
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
    from jaxglue.generation.assistant import Assistant
    from jaxglue.generation.reading import LoadedModel, find_record
    from jaxglue.serve.reading import make_readers, warm_up
    from jaxglue.serve.server import make_app, make_read_app
    from jaxglue.serve.service import Service

    dispatch_far_ahead()
    record = find_record(config)
    if record.get("kind") == "embed" or record.get("score"):
        if config.adapters:
            raise ValueError(f"--adapters: a model for {record['kind']} is served alone: leave it out")
        alone = make_readers(LoadedModel.load(config), record, most=config.max_requests, alone=config.exact)
        assert alone is not None
        echo("compiling the programs", error=True)
        try:
            for reader in alone.readers.values():
                warm_up(reader)
            _run(config, make_read_app(alone, config), [config.served_name])
        finally:
            alone.close()
        return
    assistant = Assistant(config)
    named = bool(config.named_adapters) or config.adapter_folder is not None  # of which each request would choose
    options: Any = {"most": config.max_requests, "alone": config.exact}
    reading = None if named else make_readers(LoadedModel.of(assistant), record, **options)
    service = Service(
        assistant,
        slots=config.batch_size,
        length=config.max_length,
        most=config.max_requests,
        memory=assistant.memory,
    )
    if service.length < (longest := assistant.config.max_generated_positions):
        echo(f"texts may have {service.length:,} tokens, of the model's {longest:,} (--max-length)", error=True)
    try:
        echo("compiling the programs", error=True)
        service.warm_up()
        if record and reading is not None:  # the model is for such requests
            warm_up(reading.readers[record["kind"]])
        _run(config, make_app(assistant, service, config, reading), [config.served_name, *config.named_adapters])
    except KeyboardInterrupt:
        echo("jaxglue serve: interrupted", error=True)
        sys.stdout.flush()
        os._exit(STATUS)  # threads that compile would go on for minutes, or abort the process as it ends
    finally:
        service.close()
        if reading is not None:
            reading.close()


def _run(config: ServeConfig, app: Any, names: list[str]) -> None:
    """Answer requests until the process is asked to stop."""
    import uvicorn

    from jaxglue.generation.window_sizes import switching_often
    from jaxglue.serve.connections import announcing_server, bounded_protocol

    ready = f"serving {', '.join(names)} at http://{config.host}:{config.port}/v1"
    connections: Any = {
        "http": bounded_protocol(),
        "log_level": "warning",
        "access_log": False,
        "timeout_graceful_shutdown": 5,
    }
    settings = uvicorn.Config(app, host=config.host, port=config.port, **connections)
    leave_out_what_lives_on()
    with switching_often():
        announcing_server(settings, lambda: echo(ready, error=True)).run()
