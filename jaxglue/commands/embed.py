"""Embed texts: `jaxglue embed texts.jsonl --model runs/embed/model`; `--mine 5` writes pairs with hard negatives."""

import json

import numpy as np

from jaxglue.files.atomic import atomic_file
from jaxglue.serve.config import EmbedConfig
from jaxglue.serve.measured import embedded_rows, mined_rows
from jaxglue.terminal.lines import echo


def main(config: EmbedConfig) -> None:
    """Write embeddings, or rows with mined negatives."""
    if config.mine:
        with (
            atomic_file(config.output) as target,
            target.open("w", encoding="utf-8") as file,
        ):
            rows = mined = 0
            for mined_row in mined_rows(config):
                print(json.dumps(mined_row), file=file)
                rows, mined = rows + 1, mined + len(mined_row["negative"])
        echo(f"wrote {config.output}: {rows:,} rows, {mined / max(rows, 1):.2f} negatives each")
        return
    rows_read, vectors = embedded_rows(config)
    with atomic_file(config.output) as target:
        if config.output.suffix == ".jsonl":
            with target.open("w", encoding="utf-8", errors="backslashreplace") as file:
                for row, vector in zip(rows_read, vectors, strict=True):
                    line = {**row.value, "embedding": [round(float(value), 7) for value in vector]}
                    print(json.dumps(line, default=str), file=file)
        else:
            with target.open("wb") as file:
                np.save(file, vectors, allow_pickle=False)
    echo(f"wrote {config.output}: {len(vectors):,} embeddings of {vectors.shape[1]:,} dimensions")
