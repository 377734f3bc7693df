"""Episodes with slow tools are timed to the end, those of a batch and those alone."""

import json

from selection import repeats_parts_of


@repeats_parts_of("test_episodes_go_on_to_the_bit")
def test_both_rows_are_measured(tmp_path, monkeypatch):
    import agent_turns

    file = tmp_path / "turns.json"
    sizes = "--episodes 4 --turns 2 --tokens 8 --decoding 2 --begun 3 --alone 2 --memory 1 --mean 0.05"
    monkeypatch.setattr("sys.argv", ["agent_turns.py", "--shape", "tiny", *sizes.split(), "--json", str(file)])
    agent_turns.main()
    rows = json.loads(file.read_text())["results"]
    assert [(row["episodes"], row["decoding"], row["begun"]) for row in rows] == [(2, 2, 2), (4, 2, 3)]
    for row in rows:
        assert row["log-normal s"] > 0 and row["longest s"] >= row["instant s"] > 0 and row["compiled"] >= 0
