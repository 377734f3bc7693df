"""Let aider ask the model about a file, in a repository of its own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
(folder / "sum.py").write_text("print(3 + 4)\n")
(folder / ".aider.model.settings.yml").write_text('- name: openai/tiny\n  extra_params:\n    stop: [" "]\n')
flags = ["--model", "openai/tiny", "--message", "Say hello.", "--yes", "--no-git", "--no-auto-commits", "--no-stream"]
flags += [
    "--no-show-model-warnings",
    "--no-check-update",
    "--analytics-disable",
    "--map-tokens",
    "0",
    "--edit-format",
    "ask",
]
environment = {"OPENAI_API_BASE": f"{sys.argv[1]}/v1", "OPENAI_API_KEY": "any", "HOME": str(folder), "TERM": "dumb"}
aider = Path(sys.executable).with_name("aider")
command = [str(aider), *flags, "sum.py"]
done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300)
assert done.returncode == 0 and "Tokens:" in done.stdout, done.stdout + done.stderr
print("answered")
