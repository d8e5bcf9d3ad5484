"""Processes that share a GPU, which has no collectives for them: they sum in memory, or refuse."""

import json
import re

from tests.comm import shared_gpu
from tests.rounds import gangs

COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\b")


def test_each_takes_a_gpu_and_a_plain_sum_needs_no_collective_and_what_needs_some_is_refused(
    tmp_path,
):
    dumped = tmp_path / "programs"
    flags = f"--xla_dump_to={dumped} --xla_dump_hlo_as_text"
    variables = {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    ended = gangs.run("tests.comm.shared_gpu", 2, tmp_path, str(tmp_path), **variables)
    assert [code for code, _ in ended] == [0, 0], "\n".join(said for _, said in ended)
    told = [json.loads((tmp_path / f"told-{index}.json").read_text()) for index in range(2)]
    assert [each.pop("took") for each in told] == ["0", "1"]
    assert told[0] == told[1]
    assert told[0].pop("rounds") > 2
    assert told[0].keys() == {*shared_gpu.REFUSED, "levels"}
    assert "the reducer: 'hetjax.topology.methods:d_psgd'" in told[0]["reducer"]
    assert "examples weighted by shard" in told[0]["shards"]
    texts = {path: path.read_text() for path in dumped.glob("*after_optimizations.txt")}
    assert any("jit_synchronise" in path.name for path in texts)
    # Gloo's connections are made by one gathering; there is no such where processes share a GPU.
    found = {path.name.split(".")[1] for path, text in texts.items() if COLLECTIVE.search(text)}
    assert found <= {"jit__lambda"}
