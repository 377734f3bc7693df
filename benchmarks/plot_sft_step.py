"""Draw docs/speed.png from benchmarks/results/sft_step.json, and write the README's table from it.

python benchmarks/plot_sft_step.py

Shown are rows in which both engines ran in one session on one machine, ours within Unsloth's memory. Ours of
Llama-3.1-8B joins leaderboard.json with its date and commit, which is drawn as docs/leaderboard.png.
"""

import json
import re
from operator import itemgetter
from pathlib import Path

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from kernel_profile import MATMUL
from measure import save_figure, table, write_json
from sft_step import checkpointing

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "sft_step.json"
LEADERBOARD = RESULTS.with_name("leaderboard.json")
PAGES = ROOT / "README.md", ROOT / "docs" / "index.md"
ENGINES = {"ours": ("jaxglue", "#2a6fdb"), "unsloth": ("Unsloth", "#9aa3b2")}
BOARD_PAGE, STEPS_PAGE = (ROOT / "docs" / "measured" / f"{name}.md" for name in ("index", "training"))
NAMES = {"ours": "jaxglue", "unsloth": "Unsloth", "peft": "transformers + PEFT", "liger": "transformers + PEFT + Liger"}
FIRST = "llama-3.1-8b", "qwen3-8b", "qwen3-8b NF4", "qwen2.5-7b"
"""The README has the first three of these that were measured so."""


def pairs(results: list[dict]) -> dict[str, tuple[dict, dict]]:
    """Return ours and Unsloth's of the rows that compare like with like."""
    by = {(result["row"], result["engine"]): result for result in results if "ms" in result}
    both = {name: (by[name, "ours"], by[name, "unsloth"]) for name, engine in by if engine == "unsloth"}
    session = "gpu", "date", "commit", "host_memory_gib"
    return {
        name: (ours, theirs)
        for name, (ours, theirs) in both.items()
        if ours["peak_gib"] <= theirs["peak_gib"] and all(ours.get(key) == theirs.get(key) for key in session)
    }


def main() -> None:
    """Write the charts and the tables."""
    results = json.loads(RESULTS.read_text())["results"]
    compared, board = pairs(results), json.loads(LEADERBOARD.read_text())
    extend(board, results)
    write_json(LEADERBOARD, board)
    draw(compared)
    draw_board(board["results"])
    for page, tables in rendered().items():
        text = page.read_text("utf-8")
        for new in tables:
            text = beginning_alike(new).sub(lambda _, new=new: new, text, count=1)
        page.write_text(text, "utf-8")
    print(format_table(compared))


def rendered() -> dict[Path, list[str]]:
    """Return the tables that pages have from the files as they are."""
    content = json.loads(RESULTS.read_text())
    compared, fastest = pairs(content["results"]), fastest_rows(content["results"])
    return {page: [format_table(compared)] for page in PAGES} | {
        BOARD_PAGE: [format_board(json.loads(LEADERBOARD.read_text())["results"])],
        STEPS_PAGE: [
            format_steps(compared),
            *([format_fastest(fastest)] if fastest else []),
            format_losses(content["losses"]),
        ],
    }


def fastest_rows(results: list[dict]) -> dict[str, dict[str, dict]]:
    """Return all engines' results of the rows whose peers tried several kinds of checkpointing."""
    rows: dict[str, dict[str, dict]] = {}
    for result in results:
        if "ms" in result:
            rows.setdefault(result["row"], {})[result["engine"]] = result
    return {
        name: engines
        for name, engines in rows.items()
        if "ours" in engines and any(len(result.get("tried", ())) > 1 for result in engines.values())
    }


def beginning_alike(new: str) -> re.Pattern:
    """Return a pattern of the table on a page that begins with the same two columns as a new one."""
    columns = re.escape(" | ".join(new.splitlines()[0].split(" | ")[:2]))
    return re.compile(rf"^{columns}.*\n(?:\|.*\n)+", re.M)


def without_tables(page: Path) -> str:
    """Return the text of a page without tables that are rendered from files."""
    text = page.read_text("utf-8")
    for of_files in rendered().get(page, []):
        text = text.replace(of_files, "")
    return text


def format_steps(compared: dict[str, tuple[dict, dict]]) -> str:
    """Return the table of all steps beside Unsloth's."""
    rows = [
        {
            "beside Unsloth": title(name),
            "GPU, date": f"{short_gpu(ours)}, {ours['date']}",
            "ms": f"{ours['ms']:,.0f}",
            "tokens/s": f"{speed(ours):,.0f}",
            "GiB": f"{ours['peak_gib']:.1f}",
            "Unsloth, ms": f"{theirs['ms']:,.0f}",
            "its GiB": f"{theirs['peak_gib']:.1f}",
            "faster": f"{theirs['ms'] / ours['ms']:.2f} ×",
            "of the limit": f"{ours['flops'] / ours['ms'] * 1e3 / MATMUL:.0%}",
            "weights": places(ours["plan"]),
        }
        for name, (ours, theirs) in compared.items()
    ]
    return table(rows) + "\n"


def format_fastest(rows: dict[str, dict[str, dict]]) -> str:
    """Return the table of rows in which each engine is at its fastest, whatever memory that takes."""
    shown = [
        {
            "each at its fastest": title(name),
            "engine": NAMES[engine],
            "GPU, date": f"{short_gpu(result)}, {result['date']}",
            "ms": f"{result['ms']:,.1f}",
            "tokens/s": f"{speed(result):,.0f}",
            "GiB": f"{result['peak_gib']:.1f}",
            "host GiB": f"{result['host_gib']:.1f}" if "host_gib" in result else "–",
            "its checkpointing, and others": checkpointing(result),
            "ours is faster": f"{result['ms'] / engines['ours']['ms']:.2f} ×" if engine != "ours" else "",
        }
        for name, engines in rows.items()
        for engine, result in engines.items()
    ]
    return table(shown) + "\n"


def places(plan: str) -> str:
    """Return where a plan has the layers' weights."""
    flag = plan.partition("--weights ")[2]
    return {"": "on the GPU", "host": "on the host"}.get(flag, flag.strip("'"))


def format_losses(losses: list[dict]) -> str:
    """Return the table of differences between our losses and others'."""
    rows = [
        {
            "losses": title(row["row"]),
            "engines": " and ".join(NAMES[engine] for engine in row["engines"].split(", ")),
            "steps": row["steps"],
            "largest": row["largest relative difference"],
            "mean": row["mean"],
        }
        for row in losses
        if row["engines"].startswith("ours")
    ]
    return table(rows) + "\n"


def extend(board: dict, results: list[dict]) -> None:
    """Add ours of Llama-3.1-8B to the leaderboard unless it has that run."""
    told = "gpu", "date", "commit", "versions", "command", "host_memory_gib"
    run = itemgetter("date", "commit", "setting")
    for result in results:
        if result["row"] not in ("llama-3.1-8b", "llama-3.1-8b, memory free") or result["engine"] != "ours":
            continue
        limit = result["memory_limit"]
        row = {"setting": "bf16, memory free" if limit is None else f"bf16 within {limit} GiB"}
        row |= {key: result[key] for key in ("gpu", "date", "commit", "ms", "tokens", "peak_gib")}
        row["file"] = RESULTS.name
        if run(row) not in map(run, board["results"]):
            board["results"].append(row)
            board.update({key: result.get(key) for key in told})


def draw_board(rows: list[dict]) -> None:
    """Draw tokens/s of Llama-3.1-8B by date."""
    figure, axes = plt.subplots(figsize=(7.2, 3.0))
    for setting in dict.fromkeys(row["setting"] for row in rows):
        of_it = [row for row in rows if row["setting"] == setting]
        axes.plot([row["date"] for row in of_it], [speed(row) for row in of_it], "o-", label=setting)
        for row in of_it:
            axes.annotate(
                f"{speed(row):,.0f}", (row["date"], speed(row)), (0, 6), textcoords="offset points", fontsize=8
            )
    axes.set_ylim(0, 1.2 * max(speed(row) for row in rows))
    axes.set_ylabel("tokens/s, Llama-3.1-8B, LoRA", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    save_figure(figure, ROOT / "docs" / "leaderboard.png", plotted_board(rows))


def plotted_board(rows: list[dict]) -> list:
    """Return what the leaderboard's chart shows."""
    return [[row["setting"], row["date"], round(speed(row))] for row in rows]


def format_board(rows: list[dict]) -> str:
    """Return the leaderboard's table, newest first."""
    shown = [
        {
            "date": row["date"],
            "commit": row["commit"],
            "setting": row["setting"],
            "GPU": short_gpu(row),
            "ms a step": f"{row['ms']:,.0f}",
            "tokens/s": f"{speed(row):,.0f}",
            "peak GiB": f"{row['peak_gib']:.1f}",
            "file": f"`{row['file']}`",
        }
        for row in sorted(rows, key=lambda row: row["date"], reverse=True)
    ]
    return table(shown) + "\n"


def draw(compared: dict[str, tuple[dict, dict]]) -> None:
    """Draw tokens/s of both engines, a pair of bars for each row."""
    figure, axes = plt.subplots(figsize=(7.2, 0.62 * len(compared) + 0.9))
    for position, (ours, theirs) in enumerate(compared.values()):
        for offset, result in ((-0.2, ours), (0.2, theirs)):
            label, color = ENGINES[result["engine"]]
            axes.barh(position + offset, speed(result), 0.38, color=color, label=None if position else label)
            text = f"{speed(result):,.0f}, {result['peak_gib']:.1f} GiB"
            axes.text(speed(result) - 200, position + offset, text, ha="right", va="center", color="white", fontsize=9)
    names = [f"{title(name)}\n{short_gpu(ours)}, {ours['date']}" for name, (ours, _) in compared.items()]
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(4000))
    axes.set_xlabel("tokens/s on one GPU (higher is faster), and its memory", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    figure.tight_layout()
    save_figure(figure, ROOT / "docs" / "speed.png", plotted(compared))


def plotted(compared: dict[str, tuple[dict, dict]]) -> list:
    """Return what the chart shows."""
    return [
        [name, result["date"], short_gpu(result), round(speed(result)), round(result["peak_gib"], 1)]
        for name, pair in compared.items()
        for result in pair
    ]


def format_table(compared: dict[str, tuple[dict, dict]]) -> str:
    """Return the README's table of three rows."""
    chosen = [name for name in FIRST if name in compared][:3]
    return table([_row(name, *compared[name]) for name in chosen]) + "\n"


def _row(name: str, ours: dict, theirs: dict) -> dict[str, str]:
    return {
        "tokens/s, GiB of the GPU": f"{title(name)}, {short_gpu(ours)}",
        "jaxglue": f"{speed(ours):,.0f}, {ours['peak_gib']:.1f}",
        f"Unsloth {theirs['versions']['unsloth']}" if theirs.get("versions") else "Unsloth": (
            f"{speed(theirs):,.0f}, {theirs['peak_gib']:.1f}"
        ),
        "faster": f"{theirs['ms'] / ours['ms']:.2f} ×",
        "date, commit": f"{ours['date']} {ours['commit']}",
    }


def speed(result: dict) -> float:
    """Return tokens/s."""
    return result["tokens"] / result["ms"] * 1e3


def title(name: str) -> str:
    """Format a row's name as a model name and its method, such as Qwen3-8B, LoRA, 2,048 tokens."""
    name, comma, rest = name.partition(", ")
    name = name.removesuffix(" NF4") + (", QLoRA" if name.endswith(" NF4") else ", LoRA") + comma + rest
    name = name.replace("deepseek-v2-lite", "DeepSeek-V2-Lite")
    return re.sub(r"(?<=\d)b\b", "B", name[0].upper() + name[1:])


def short_gpu(result: dict) -> str:
    """Return H200 of NVIDIA H200."""
    return re.search(r"[A-Z]+\d+", result["gpu"].removeprefix("NVIDIA "))[0]


if __name__ == "__main__":
    main()
