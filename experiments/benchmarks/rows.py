"""The tables that the benchmark programs print."""

import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax


class Row(NamedTuple):
    figure: str
    target: str
    reached: str


def processor() -> str:
    """Its model and widest vectors, where the system tells: ratios of libraries depend on them."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    vectors = {"avx512f": "AVX-512", "avx2": "AVX2"}
    return ", ".join([model, *[vectors[flag] for flag in vectors if flag in flags][:1]])


def machine() -> str:
    """What this process computes on."""
    return (
        f"{processor()}, {os.cpu_count()} cores, "
        f"{jax.devices()[0].device_kind}, Python {platform.python_version()}, "
        f"JAX {jax.__version__}"
    )


def print_tables(
    groups: Mapping[str, Callable[[], Iterable[Row]]],
    only: Sequence[str],
    machine: Callable[[], str] = machine,
) -> None:
    """Measures the groups, or those in `only`, and prints their rows as one Markdown table.

    Seconds of each group go to stderr. Exits with a message where `only` has an unknown name.
    `machine` says what they are measured on.
    """
    if unknown := set(only) - set(groups):
        sys.exit(f"--only: there is no {', '.join(unknown)}; allowed are {', '.join(groups)}")
    print(f"{machine()}\n")
    print("| figure | target | reached |\n|---|---|---|")
    for name, measure in groups.items():
        if only and name not in only:
            continue
        began = time.perf_counter()
        for row in measure():
            print(f"| {row.figure} | {row.target} | {row.reached} |", flush=True)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
