"""The page of the drill of engines, and what its command says of engines that are not there."""

import pytest

from experiments.comparisons import kept
from experiments.drills import engines
from tests import programs


def record(engine, seed, **changes):
    secs = dict(zip(engines.PARTS, (1.0, 4.0, 0.5, 2.0, 1.5, 1.0), strict=True))
    whole = {"whole": True, "bit_equal": True, "missing": 0, "doubled": 0, "left_in_memory": 0}
    where = {"engine": engine, "seed": seed, "rank": seed, "round": 7, "exit_code": 137}
    where |= {"commit": "1234567", "secs_to_first_new_round": 10.0, "secs": secs}
    return {**where, **whole, **changes}


def test_the_table_adds_up_what_each_engine_did(tmp_path):
    broken = {"whole": False, "bit_equal": False, "missing": 3, "secs_to_first_new_round": 20.0}
    for line in (
        *(record("slurm", 0), record("open_mpi", 0), record("open_mpi", 1, **broken)),
        record("open_mpi", 2, left_in_memory=1),
    ):
        kept.append(tmp_path / "runs.jsonl", line)
    table = engines.table(tmp_path)
    assert table.startswith("| name | target | Open MPI | Slurm, two nodes |\n")
    assert "| joined, killed, gone on | 20 of 20 | 2 of 3 | 1 of 1 |" in table
    assert "| … of them process 0 |  | 1 | 1 |" in table
    assert "| … equal to the bit | 20 of 20 | 2 of 3 | 1 of 1 |" in table
    assert "| examples missing | 0 | 3 | 0 |" in table
    assert "| files left in shared memory | 0 | 1 | 0 |" in table
    assert "| kill to the first new round, s | told | 10.0 (20.0) | 10.0 (10.0) |" in table
    assert "| … hetjax's own, s | ≤ 10 | 1.5 (1.5) | 1.5 (1.5) |" in table


def test_the_page_says_what_the_kept_lines_say():
    kept_page = (engines.RESULTS / "README.md").read_text()
    assert kept_page == engines.page(engines.RESULTS)


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--engines=pbs"], 1, "there is no pbs; there are open_mpi, slurm, ray"),
        (["--engines=open_mpi"], 0, "open_mpi is left out: there is no mpirun"),
    ],
)
def test_the_command_says_which_engine_is_not_there(flags, code, said, tmp_path):
    command = ["-m", "experiments.drills.engines", f"--results={tmp_path}", *flags]
    ran = programs.run(command, tmp_path, PATH=str(tmp_path))
    assert (ran.returncode, said in ran.stderr) == (code, True), ran.stderr
    assert not list(tmp_path.iterdir())
