"""Print the fastest rings of files of `experts_few_rows.py` as JAXGLUE_RINGS takes them (a probe)."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from experts_few_rows import VARIANTS

from jaxglue.ops.moe.routing import few_rows_tile

totals: dict[tuple[int, str], list[float]] = {}
for file in map(Path, sys.argv[1:]):
    for row in json.loads(file.read_text())["results"]["rows"]:
        tiles = VARIANTS["mxfp4"].get(row["tiles"], {})
        wrong = "without" in row["tiles"] or row["us"] != row["us"] or float(row["error"]) > 0.01
        if (tiles.get("ring") or row["tiles"] == "former") and not wrong:
            totals.setdefault((row["tokens"], row["tiles"]), []).append(row["us"])
chosen: dict[str, dict | None] = {}
for tokens in sorted({tokens for tokens, _ in totals}):
    timed = {name: sum(us) for (count, name), us in totals.items() if count == tokens and len(us) == 2}
    best = min(timed, key=timed.__getitem__)
    print(tokens, sorted(timed.items(), key=lambda item: item[1]), file=sys.stderr)
    ring = VARIANTS["mxfp4"].get(best, {}).get("ring")
    chosen[str(few_rows_tile(tokens * 4 // 32))] = ring and asdict(ring)
chosen.setdefault("32", chosen.get("64"))
print(json.dumps(chosen))
