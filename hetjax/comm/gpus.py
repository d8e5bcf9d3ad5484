"""Which GPUs does a process see, which of them is its own, and do processes share one?

The driver's PCI bus ids tell GPUs apart. Numbers do not: a process that a scheduler
or a container isolates sees its own GPU as 0, as its neighbours see theirs. JAX says
neither bus ids nor UUIDs in what its stubs declare. Two parts of a GPU (MIG) count as one GPU.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Used(NamedTuple):
    """The GPUs that a process computes on, as it tells the others of its machine."""

    bus_ids: list[str]  # []: the driver does not say
    names: list[str]  # by their numbers and the variables of the environment


def visible() -> list[str]:
    """The bus id of each GPU that CUDA shows this process, by its number; []: none can be read."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    try:
        return bus_ids(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return []


def bus_ids(driver: Any) -> list[str]:
    """What CUDA's driver says of the GPUs that it shows; [] where it fails.

    Args:
        driver: `libcuda`, loaded.
    """
    count, device, text = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for ordinal in range(count.value):
        failed = driver.cuDeviceGet(ctypes.byref(device), ordinal)
        if failed or driver.cuDeviceGetPCIBusId(text, len(text), device):
            return []
        found.append(text.value.decode())
    return found


def own(
    seen: Sequence[Sequence[str]], index: int, *, chosen: str = "all", is_guess: bool = False
) -> str:
    """Which of the GPUs that it sees a process takes, as `jax_cuda_visible_devices` has it.

    Processes that see the same GPUs take one each, in order, if there are enough. Others keep all.

    Args:
        seen: what `visible` says in each process of the machine.
        index: of the process among these.
        chosen: what is set already, and stays.
        is_guess: whether JAX set it, to the number of the process on its machine. A process that is
            isolated has no GPU of that number.

    Example:
        >>> own([["a", "b"], ["a", "b"]], 1), own([["a"], ["b"]], 1), own([["a"], ["a"]], 1)
        ('1', 'all', 'all')
    """
    gpus = seen[index]
    if is_guess and chosen.isdecimal() and 0 < len(gpus) <= int(chosen):
        return "all"
    alike = [other for other, theirs in enumerate(seen) if theirs == gpus]
    return f"{alike.index(index)}" if chosen == "all" and 1 < len(alike) <= len(gpus) else chosen


def used(ordinals: Sequence[int], environment: Mapping[str, str] = os.environ) -> Used:
    """What this process tells of the GPUs with these numbers among those that it sees.

    Example:
        >>> used([0, 1], {"CUDA_VISIBLE_DEVICES": "3,1"}).names
        ['3', '1']
    """
    shown = next((environment[name] for name in _VISIBLE if environment.get(name)), "")
    names = dict(enumerate(name.strip() for name in shown.split(","))) if shown else {}
    ids = dict(enumerate(visible()))
    return Used(
        [ids[ordinal] for ordinal in ordinals if ordinal in ids],
        [names.get(ordinal, str(ordinal)) for ordinal in ordinals],
    )


def shared(told: Sequence[Used]) -> bool:
    """Whether processes of one machine share a GPU: by bus ids if all know theirs, else by names.

    Example:
        >>> shared([Used(["0000:3b:00.0"], ["0"]), Used(["0000:86:00.0"], ["0"])])
        False
        >>> shared([Used([], ["0"]), Used(["0000:86:00.0"], ["0"])])
        True
    """
    are_known = all(each.bus_ids for each in told)
    found = [gpu for each in told for gpu in (each.bus_ids if are_known else each.names)]
    return len(set(found)) < len(found)
