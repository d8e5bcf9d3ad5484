"""CPU devices as workers, and the memory of a process that has some."""

import ctypes
import os
import sys

import jax
import numpy as np

_SPARE_COPIES = 8  # copies of the parameters that rounds may need beyond those of the warm-up
_LEAST_SPARE_BYTES, _MOST_SPARE_BYTES = 1 << 25, 1 << 29


def use_cpu_workers(num_workers: int) -> None:
    """Makes XLA's CPU backend show `num_workers` devices.

    Call it before anything uses a JAX device. It is harmless if an accelerator is the default
    backend: it sets the number of CPU devices alone. From then on the process keeps the memory that
    a program frees (glibc). Else each round of a large model would ask for its pages anew: with
    balanced orders a step of 5 million parameters took 59 ms, and takes 44.

    Args:
        num_workers: n, at least 1.

    Raises:
        ValueError: JAX has already started with fewer CPU devices.
    """
    _keep_freed_memory()
    try:
        if jax.config.jax_num_cpu_devices < num_workers:  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", num_workers)
    except RuntimeError:
        if len(jax.devices("cpu")) < num_workers:
            raise ValueError(
                f"use_cpu_workers({num_workers}): JAX already runs with {len(jax.devices('cpu'))} "
                "CPU device(s); call it first (notebook: restart), or take local='virtual'"
            ) from None


def _keep_freed_memory() -> None:
    """Tells glibc's malloc to give no large block back to the system.

    Does nothing without glibc, or if the environment tells malloc what to do.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if not sys.platform.startswith("linux") or "glibc.malloc" in tunables:
        return
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25)  # the most before 2.35


def touch_memory(copy_bytes: int) -> None:
    """Allocates a large block and frees it at once.

    The launcher has told malloc to keep freed memory, so the first rounds find it ready.

    Args:
        copy_bytes: of the parameters of this process's workers.
    """
    np.ones(min(max(_SPARE_COPIES * copy_bytes, _LEAST_SPARE_BYTES), _MOST_SPARE_BYTES), np.uint8)
