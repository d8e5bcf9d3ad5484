"""Where the workers of a run are, and where what they have is put."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from hetjax import mesh as mesh_lib
from hetjax import types


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the workers of a run are."""

    mesh: Mesh | None  # None: what they share lies on the first device
    devices: list[jax.Device]  # the first of each worker
    own: list[int]  # the workers of this process
    leading: Callable[[], bool] | None = None  # where that changes: whether this process leads now
    layout: mesh_lib.Layout | None = None  # where workers have several devices

    @property
    def leads(self) -> bool:
        """Whether this process evaluates, writes and reports."""
        return self.own[0] == 0 if self.leading is None else self.leading()

    @property
    def may_lead(self) -> bool:
        """Whether it leads, or may later."""
        return self.leads or self.leading is not None

    @property
    def num_rows(self) -> int:
        """Of the arrays of the training state: a row a worker, in a run apart one's own alone."""
        return len(self.devices) if self.mesh is None else self.mesh.shape[mesh_lib.WORKER_AXIS]

    def rows(self, tree: types.PyTree) -> list[types.PyTree]:
        """The rows `[1, ...]` of this process's workers, each on its worker's device."""
        if self.mesh is not None:
            return mesh_lib.worker_rows(tree)
        rows = _sliced(tree, len(self.devices))
        return [jax.device_put(row, device) for row, device in zip(rows, self.devices, strict=True)]

    @functools.cached_property
    def places(self) -> list[mesh_lib.Place]:
        """Of each worker."""
        if self.layout is None:
            return list(self.devices)
        places = list(map(mesh_lib.everywhere, mesh_lib.worker_meshes(self.layout.mesh)))
        return places * (len(self.devices) // len(places))  # in a run apart one for all

    def of_rows(self, made: types.PyTree) -> Any:
        """Shardings of leaves `[num_workers, ...]`, a row a worker."""
        return self.layout.of_rows(made) if self.layout else mesh_lib.worker_sharding(self.mesh)

    @functools.cached_property
    def own_meshes(self) -> list[Mesh]:
        """Of the workers of this process, where each has a slice."""
        return [self.places[worker].mesh for worker in self.own]

    @property
    def own_place(self) -> mesh_lib.Place:
        """Of this process's first worker."""
        return self.places[self.own[0]]

    @property
    def own_device(self) -> jax.Device:
        """The first of this process's first worker."""
        return self.devices[self.own[0]]

    def put(self, tree: types.PyTree) -> types.PyTree:
        """Leaves without worker axis, on this process's first worker."""
        return mesh_lib.put(tree, self.own_place, self.layout)

    def place(self, tree: types.PyTree) -> types.PyTree:
        """Leaves `[num_workers, ...]`, a row a worker; each process puts its own."""
        return mesh_lib.place(tree, self.mesh, self.layout)


@functools.partial(jax.jit, static_argnums=1)
def _sliced(tree: types.PyTree, num_workers: int) -> list[types.PyTree]:
    """The rows `[1, ...]` of workers that share a device: copies."""
    return [jax.tree.map(lambda leaf, w=w: leaf[w : w + 1], tree) for w in range(num_workers)]
