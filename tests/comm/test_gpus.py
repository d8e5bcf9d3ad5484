"""Which GPUs a process sees, which is its own, and whether processes share one."""

import ctypes

import pytest

from hetjax.comm import gpus

FOUR = ["0000:07:00.0", "0000:0F:00.0", "0000:47:00.0", "0000:4E:00.0"]
INT = ctypes.POINTER(ctypes.c_int)


class Driver:
    """CUDA's driver by its C interface, on a machine with these GPUs; a call of `fails` fails."""

    def __init__(self, shown, fails=""):
        def get_bus_id(text, size, device):
            ctypes.memmove(text, shown[device - 7].encode() + b"\0", len(shown[device - 7]) + 1)
            return 0 if len(shown[device - 7]) < size else 1

        def put(place, value):
            place[0] = value
            return 0

        for name, types, does in (
            ("cuInit", [ctypes.c_uint], lambda flags: flags),
            ("cuDeviceGetCount", [INT], lambda count: put(count, len(shown))),
            ("cuDeviceGet", [INT, ctypes.c_int], lambda device, n: put(device, n + 7)),
            ("cuDeviceGetPCIBusId", [ctypes.c_void_p, ctypes.c_int, ctypes.c_int], get_bus_id),
        ):
            called = (lambda *_: 100) if name == fails else does  # CUDA_ERROR_NO_DEVICE
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(called))


def test_the_driver_says_the_bus_ids_of_the_gpus_that_it_shows_and_nothing_where_it_fails():
    assert gpus.bus_ids(Driver(FOUR)) == FOUR
    assert gpus.bus_ids(Driver([])) == []
    for call in ("cuInit", "cuDeviceGetPCIBusId"):
        assert gpus.bus_ids(Driver(FOUR, fails=call)) == []


def test_what_a_process_tells_are_the_gpus_that_it_uses(monkeypatch):
    monkeypatch.setattr(gpus, "visible", lambda: FOUR[2:])
    said = gpus.used([1], {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert said == gpus.Used([FOUR[3]], ["3"])
    monkeypatch.setattr(gpus, "visible", list)
    assert gpus.used([1], {}) == gpus.Used([], ["1"])


@pytest.mark.parametrize(
    ("told", "share"),
    [
        # Isolated by a scheduler or a container: each sees its own as 0.
        ([([FOUR[0]], ["0"]), ([FOUR[1]], ["0"])], False),
        # One GPU by its number and by its UUID.
        ([([FOUR[0]], ["0"]), ([FOUR[0]], ["GPU-3a2c"])], True),
        ([(FOUR[:2], ["0", "1"]), (FOUR[1:3], ["0", "1"])], True),
        # Where a driver does not say, the names count.
        ([([], ["0"]), ([FOUR[1]], ["0"])], True),
    ],
)
def test_processes_share_a_gpu_by_what_each_said(told, share):
    assert gpus.shared([gpus.Used(*each) for each in told]) is share


@pytest.mark.parametrize(
    ("seen", "set_already", "taken"),
    [
        ([FOUR] * 4, {}, ["0", "1", "2", "3"]),
        ([FOUR] * 5, {}, ["all"] * 5),  # too few
        ([[gpu] for gpu in FOUR], {}, ["all"] * 4),
        ([FOUR[:2], FOUR[2:], FOUR[:2], FOUR[2:]], {}, ["0", "0", "1", "1"]),
        ([FOUR] * 2, {"chosen": "1,2"}, ["1,2"] * 2),
        # JAX under Slurm, in processes that see all of a machine's GPUs and that see one each.
        ([FOUR] * 2, {"chosen": "1", "is_guess": True}, ["1"] * 2),
        ([FOUR[:1], FOUR[1:2]], {"chosen": "1", "is_guess": True}, ["all"] * 2),
    ],
)
def test_processes_that_see_the_same_gpus_take_one_each(seen, set_already, taken):
    assert [gpus.own(seen, index, **set_already) for index in range(len(seen))] == taken
