"""The page's parts as files: skeleton, style and panels; joined into one file that needs no server."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxglue.files.atomic import atomic_file
from jaxglue.ui.run_files import read_run

PAGE = "run.html"
_HERE = Path(__file__).parent
PANELS = ("plan", "curves", "rows", "rollouts", "samples", "reliability", "chat", "exports")
"""One file each, in the order of the page."""


def script() -> str:
    """Return the page's program: drawing, panels, and the start that shows them."""
    names = ["draw.js", *(f"panels/{name}.js" for name in PANELS), "page.js"]
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in names)


def style() -> str:
    """Return the page's style."""
    return (_HERE / "style.css").read_text(encoding="utf-8")


def skeleton(head: str, data: str = "") -> str:
    """Return the page with these lines in its head, and perhaps its data."""
    text = (_HERE / "page.html").read_text(encoding="utf-8")
    return text.replace("<!--HEAD-->", head, 1).replace("<!--DATA-->", data, 1)


def static_page(runs: Sequence[dict[str, Any]]) -> str:
    """Return the page of some runs as one file; texts of models and data are data there, never markup."""
    program, rules = script(), style()
    policy = f"default-src 'none'; script-src {_hash(program)}; style-src {_hash(rules)}; img-src data:"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{rules}</style>\n<script>{program}</script>"
    )
    # "<" would end the script that holds the data, as "</script>" of an answer.
    text = to_json(list(runs)).replace("<", "\\u003c")
    return skeleton(head, f'<script type="application/json" id="data">{text}</script>')


def write_page(folder: Path) -> Path:
    """Write the page of a run into its folder."""
    text = static_page([read_run(folder).as_json()])
    with atomic_file(folder / PAGE) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return folder / PAGE


def to_json(value: Any) -> str:
    """Return JSON, with null for numbers that JSON lacks."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
