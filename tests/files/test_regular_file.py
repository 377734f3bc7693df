"""Files of strangers: regular ones of a bounded size, with values of the right type."""

import json
import os

import pytest

from jaxglue.data.tokenizer import load_tokenizer, read_template
from jaxglue.files.json_file import read_json
from jaxglue.files.regular_file import open_regular, read_regular, read_regular_text
from jaxglue.hf.serving import folder_stops
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.settings.recipe import read_tables
from jaxglue.training.divergence import load_step
from jaxglue.training.vocabulary import add_tokens

READERS = {
    "open": open_regular,
    "json": read_json,
    "recipe": read_tables,
    "template": read_template,
    "weights": lambda path: TensorFiles([path]),
    "steps": load_step,
    "new tokens": lambda path: add_tokens(None, path),
}


@pytest.fixture(params=["a pipe", "a device"])
def endless(request, tmp_path):
    path = tmp_path / "endless"
    if request.param == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path, request.param


@pytest.mark.parametrize("reader", READERS)
def test_pipes_and_devices_are_refused_at_once(endless, reader):
    path, kind = endless
    with pytest.raises(ValueError, match=f"{path} is {kind}: write its content to a file"):
        READERS[reader](path)


def test_a_pipe_beside_a_tokenizer_is_refused(tmp_path, make_tokenizer):
    make_tokenizer("plain").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(ValueError, match=r"chat_template.jinja is a pipe"):
        load_tokenizer(tmp_path)


def test_files_are_read_up_to_a_size(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a\r\nb")
    assert read_regular(path, 4) == b"a\r\nb"
    assert read_regular_text(path) == "a\nb"
    with pytest.raises(ValueError, match="text has 4 bytes: at most 3 are read"):
        read_regular(path, 3)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


@pytest.mark.parametrize("template", [5, ["a"], {"default": 5}])
def test_a_chat_template_that_is_no_text_is_refused(tmp_path, make_tokenizer, template):
    make_tokenizer("plain").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(ValueError, match=r"the (chat template of the )?tokenizer in .* (must be a text|cannot be)"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("stop", [99999999999999999999, [1, -(2**40)], "2", True, 1.5, {}])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, stop):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    with pytest.raises(ValueError, match="eos_token_id: expected token ids, got"):
        folder_stops(tmp_path)
