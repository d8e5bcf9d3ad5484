"""The README's examples of a loop and of a part of one's own run as they stand."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("title", ["Your own loop", "Bring your own part"])
def test_the_example_runs_as_it_stands(title, tmp_path):
    section = (ROOT / "README.md").read_text().split(f"### {title}\n")[1]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    quotas = [int(number) for number in re.findall(r"\d+", ran.stdout.split("]")[0])]
    assert len(quotas) == 4, ran.stdout
    if title == "Bring your own part":
        assert sum(quotas) == 12
        assert quotas[0] > quotas[3] >= 2
