"""Was every process of a run given the same, and did each make the same of it?

They compare before the first round. What they do in a round is compared by
`comm/allgather_work.py`.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax

from hetjax import digests as digests_lib
from hetjax import types
from hetjax.comm import allgather_work, runtime
from hetjax.comm import key_value_store as store_lib
from hetjax.topology import reducers

_PATIENCE_SECS = 600.0
_PROGRAMS = ("loss", "optimizer", "rule", "estimator")  # of digests
_OF_DATA = ("examples", "other data", "another first example of the stream")


def check_same_run(config: dict[str, Any], examples: Any, versions: dict[str, str]) -> None:
    """Compares what this process was given with what process 0 was, before anything is made of it.

    Raises:
        DisagreementError: it is another configuration, version, or size or form of the data.
    """
    own: dict[str, Any] = {"versions": versions, "examples": examples}
    own |= {f"config.{name}": value for name, value in config.items()}
    _compare("same run", own, {})


def check_same_parts(
    digests: Mapping[str, Any],
    *,
    holds_all: bool = False,
    shards: Any = (),
    mixing: reducers.Mixing | None = None,
    trace: Any = (),
    first: types.PyTree = (),
) -> None:
    """Compares, by digests, what each process was given or has made, and all need alike.

    Args:
        digests: of the run, by name.
        holds_all: whether each process has all data; else it need not have others' shards.
        shards: the ids of private data's shards, and their shares of the examples.
        mixing: of a reducer that gossips: the partners, and their weights.
        trace: the rounds that are replayed.
        first: the first example of an iterable, which each process goes through.

    Raises:
        DisagreementError: it is not to the bit what another process has.
    """
    made = {
        "other data": digests.get("values") if holds_all else (),
        "other initial parameters": digests.get("params"),
        "other shards": shards,
        "other exchanges": mixing and (mixing.gossip.partners, mixing.gossip.weights),
        "another replayed trace": trace,
        "another first example of the stream": first,
    }
    programs = {f"another {name}": digests[name] for name in _PROGRAMS if name in digests}
    _compare("same parts", {name: digests_lib.of_arrays(made[name]) for name in made}, programs)


def _compare(what: str, own: dict[str, Any], programs: dict[str, str]) -> None:
    """Compares JSON values, by name, with those of process 0, and programs with those of the first
    process of this platform."""
    board, own_id = store_lib.KeyValueStore(what), runtime.current().process_id
    own, here = json.loads(json.dumps(own)), [own_id, programs]  # as others hear it
    if runtime.current().is_first:
        board.post(jax.default_backend(), here)
        board.post("all", own)
        return
    try:
        theirs = board.wait("all", _PATIENCE_SECS, what=f"come to the check of the {what}")
    except TimeoutError as error:
        missing = f"process 0 did not come to the check of the {what}"
        raise allgather_work.DisagreementError(missing) from error
    first, programs_there = board.settled(jax.default_backend(), here)
    compared = [(0, name, value, theirs.get(name)) for name, value in own.items()]
    compared += [(first, name, value, programs_there.get(name)) for name, value in programs.items()]
    if not (differ := [each for each in compared if each[2] != each[3]]):
        return
    texts = [
        f"{name} than process {by}"
        if "other " in name
        else f"{name} = {value!r} and process {by} has {there!r}"
        for by, name, value, there in differ
    ]
    way = "all need one program, learning rate, configuration and copy of the data"
    if any(name in _OF_DATA for _, name, *_ in differ):
        way = "give each process all of the data, or say data={'sharing': 'process_local'}"
    raise allgather_work.DisagreementError(f"process {own_id} has {', '.join(texts)}; {way}")
