"""The wheel carries everything: installed into an empty environment, it trains the quickstart, without torch."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from selection import repeats_parts_of

ROOT = Path(__file__).parents[1]
CONTENT = ("jaxglue", "models", "pyproject.toml", "README.md", "LICENSE", "NOTICE")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the source distribution as by `python -m build`; setuptools leaves files, so in a copy."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in CONTENT:
        source, skip = ROOT / name, shutil.ignore_patterns("__pycache__")
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name, **({"symlinks": True, "ignore": skip} if source.is_dir() else {}))
    hook = "import sys, setuptools.build_meta as backend; print(backend.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", hook, str(folder)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (sources,) = folder.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(sources)], check=True)
    return next(folder.glob("*.whl"))


def forbid_torch(site):
    """Put in a torch that looks installed, and fails on import."""
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')")
    (site / "torch-2.9.0.dist-info").mkdir()
    (site / "torch-2.9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")


@pytest.fixture(scope="module")
def jaxglue(wheel, tmp_path_factory):
    """Run the command of an environment that has the wheel, and this one's packages: jaxglue(*arguments) → output."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    forbid_torch(site)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    away = {"PYTHONPATH", "JAXGLUE_CHECKOUT"}
    environment = {name: value for name, value in os.environ.items() if name not in away} | {"JAX_PLATFORMS": "cpu"}

    def run(*arguments: str) -> str:
        command = [str(folder / "bin" / "jaxglue"), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    run.folder = folder
    return run


def files_of(folder):
    """Yield a package's files, without those that Python or macOS put there."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store":
            yield path


def test_wheel_has_license_recipes_and_models(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("models/llama.py", "recipes/quickstart.toml", "recipes/quickstart/chats.jsonl"):
        assert f"jaxglue/{name}" in names
    assert "jaxglue/recipes/quickstart/model/tokenizer.json" in names
    sources = {path.relative_to(ROOT).as_posix() for name in ("jaxglue", "models") for path in files_of(ROOT / name)}
    assert not {f"jaxglue/{name}" if name.startswith("models/") else name for name in sources} - {*names}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_command_plans_the_quickstart(jaxglue):
    assert jaxglue("--version").startswith("jaxglue 0.")
    jaxglue("train", "--recipe", "quickstart", "--output", "planned", "--dry-run")


@repeats_parts_of("test_installed_command_plans_the_quickstart")
def test_installed_command_trains_the_quickstart(jaxglue):
    flags = "--steps 2 --log-every 1 --eval-fraction 0 --sample-prompt --compilation-cache none"
    jaxglue("train", "--recipe", "quickstart", "--output", "run", *shlex.split(flags))
    run = jaxglue.folder / "run"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert jaxglue("generate", "--adapter", "run/adapter", "--prompt", "What is 3 plus 4?", "--max-tokens", "2")
    model = tomllib.loads((run / "config.toml").read_text())["model"]["model"]
    assert Path(model).is_relative_to(jaxglue.folder)
