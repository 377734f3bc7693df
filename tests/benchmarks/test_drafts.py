"""The benchmark of drafts ends with a row for each number of streams and drafts."""

import json

from selection import repeats_parts_of

from jaxglue.generation.programs import EnginePrograms


@repeats_parts_of("test_answers_are_those_without_drafts")
def test_rows_of_drafts_are_written(tmp_path, monkeypatch):
    import drafts

    monkeypatch.setattr(EnginePrograms, "matches", EnginePrograms.matches)  # so that the own ones come back
    file = tmp_path / "drafts.json"
    flags = ["--shape", "tiny-qwen3.5", "--streams", "2", "--drafts", "off", "2", "--words", "64"]
    flags += ["--lengths", "4", "20", "--repeats", "1"]
    monkeypatch.setattr(drafts, "CONTEXT", 20)
    monkeypatch.setattr("sys.argv", ["drafts.py", *flags, "--json", str(file)])
    drafts.main()
    plain, drafted = json.loads(file.read_text())["results"]
    assert plain["times"] == 1 and plain["accepted"] is None
    assert 0.4 < drafted["accepted"] < 0.8 and drafted["predicted"] > 0
