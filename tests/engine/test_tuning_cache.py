import json
import os

from jaxglue.engine.tuning_cache import FOLDER, check_tuning, note_tuning


def write(cache, **choices):
    (cache / FOLDER / "version").mkdir(parents=True, exist_ok=True)
    for name, text in choices.items():
        (cache / FOLDER / "version" / name).write_text(text)


def test_damaged_choices_are_removed_and_new_ones_noted(tmp_path, caplog):
    check_tuning(tmp_path)
    assert not os.listdir(tmp_path)
    write(tmp_path, a="algorithm: 1", b="algorithm: 2")
    note_tuning(tmp_path)
    write(tmp_path, a="algorithm: 3", c="algorithm: 4")
    check_tuning(tmp_path)
    assert sorted(os.listdir(tmp_path / FOLDER / "version")) == ["b", "c"]
    assert "removed damaged choices of algorithms (1)" in caplog.text
    write(tmp_path, a="algorithm: 1")
    check_tuning(tmp_path)
    assert sorted(os.listdir(tmp_path / FOLDER / "version")) == ["a", "b", "c"]


def test_damaged_digests_are_written_again(tmp_path):
    write(tmp_path, a="algorithm: 1")
    (tmp_path / ".jaxglue.tuned.json").write_text("[")
    check_tuning(tmp_path)
    assert json.loads((tmp_path / ".jaxglue.tuned.json").read_text()).keys() == {"version/a"}


def test_a_file_in_the_place_of_the_choices_is_removed(tmp_path, caplog):
    (tmp_path / FOLDER).write_text("a file")
    check_tuning(tmp_path)
    assert not (tmp_path / FOLDER).exists()
    assert "removed a file in the place of a folder" in caplog.text
