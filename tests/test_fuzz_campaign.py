"""A few of the campaign's bad inputs (`fuzz_campaign.py`): each is refused in one line, and none is taken."""

import pytest
from selection import thorough

pytest.importorskip("hypothesis")
import fuzz_campaign as campaign


def subjects(*names: str):
    return [name for name in campaign.SUBJECTS if name in names]


@pytest.mark.parametrize("subject", subjects("recipes", "flags", "rows", "architectures", "adapters"))
def test_bad_inputs_are_refused(subject, tmp_path):
    faults = list(campaign.run(campaign.prepared([subject], tmp_path), seed=20, count=40))
    assert not faults


@thorough("test_fuzz.py")
@pytest.mark.parametrize("subject", subjects("gguf", "serve", "tinker"))
def test_bad_requests_and_folders_are_refused(subject, tmp_path):
    pytest.importorskip("starlette")
    pytest.importorskip("gguf")
    faults = list(campaign.run(campaign.prepared([subject], tmp_path), seed=20, count=60))
    assert not faults


def require_one_line(text):
    raise ValueError(text)


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda: None, "silent"),
        (lambda: {}["missing"], "traceback"),
        (lambda: require_one_line("a\nb"), "traceback"),
        (lambda: exec("while True: pass"), "hang"),
    ],
)
def test_faults_are_noticed(read, kind, monkeypatch):
    monkeypatch.setattr(campaign, "CPU_SECONDS", 1)
    assert campaign.attempt(read)[0] == kind
