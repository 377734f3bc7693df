import pytest
from run_folders import make_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / objective, objective) for objective in ("sft", "dpo", "grpo")]
