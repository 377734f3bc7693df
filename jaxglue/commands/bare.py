"""Words that a command takes before its flags: `jaxglue train my.yml`, `jaxglue chat runs/mine`."""

from pathlib import Path

_ADAPTER = "adapter_config.json"


def recipe(*names: str) -> list[str]:
    """Return the flag for a recipe's file or name.

    Raises:
        ValueError: several.
    """
    if len(names) > 1:
        raise ValueError(f"{' '.join(names)}: one recipe is read, and everything else is a flag: --name value")
    return ["--recipe", *names]


def folder(*names: str) -> list[str]:
    """Return the flag for the folder of a model, an adapter or a run, or for a model's name on the hub.

    Raises:
        ValueError: several.
    """
    if len(names) > 1:
        raise ValueError(f"{' '.join(names)}: one folder is read, and everything else is a flag: --name value")
    path = Path(names[0]).expanduser()
    if (path / _ADAPTER).is_file():
        return ["--adapter", *names]
    for kind in ("adapter", "model"):  # of a run
        if (path / kind).is_dir() and not (path / "config.json").is_file():
            return [f"--{kind}", str(path / kind)]
    return ["--model", *names]


def data(*names: str) -> list[str]:
    """Return the flag for files of rows."""
    return ["--data", *names]


def runs(*names: str) -> list[str]:
    """Return the flag for the folders of runs."""
    return ["--runs", *names]
