"""What each device has where workers are slices of 4 and of 2 devices: a kernel, a microbatch."""

import jax
import style
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib import patches

import hetjax
from hetjax import mesh as mesh_lib

SLICES = {"data": 2, "model": 2}, {"data": 1, "model": 2}  # of {"data": 0, "model": 2}
KERNEL, SPEC, EXAMPLES = (8, 8), P("data", "model"), 4


def parts(mesh, shape, spec):
    """The part that each device has: (start, stop) along each axis."""
    found = NamedSharding(mesh, spec).devices_indices_map(shape)
    return [
        [list(cut.indices(size)[:2]) for cut, size in zip(found[device], shape, strict=True)]
        for device in mesh.devices.flat
    ]


def numbers():
    hetjax.use_cpu_workers(4)
    found = []
    for slices in SLICES:
        count = slices["data"] * slices["model"]
        mesh = mesh_lib.mesh_of(jax.devices()[:count], slices)
        rows = [held for (held,) in parts(mesh, (EXAMPLES,), P("data"))]
        found.append({"kernels": parts(mesh, KERNEL, SPEC), "examples": rows})
    return {"slices": found}


def cells(axes, at, shape, held, colour):
    """A grid of numbers, of which the part is coloured that a device holds."""
    size, (left, top) = 0.1, at
    (first, last), (start, stop) = held
    corner = left + start * size, top - last * size
    axes.add_patch(
        patches.Rectangle(corner, (stop - start) * size, (last - first) * size, fc=colour)
    )
    right, low = left + shape[1] * size, top - shape[0] * size
    for row in range(shape[0] + 1):
        axes.plot([left, right], [top - row * size] * 2, color=style.FAINT, lw=0.5)
    for column in range(shape[1] + 1):
        axes.plot([left + column * size] * 2, [low, top], color=style.FAINT, lw=0.5)


def draw(found):
    figure, axes = style.plt.subplots(figsize=(7.2, 2.9))
    for worker, each in enumerate(found["slices"]):
        left, colour, count = 4.6 * worker, style.COLOURS[worker], len(each["examples"])
        height = 0.05 + 1.35 * (count // 2)
        low = 3.1 - height
        axes.add_patch(
            patches.FancyBboxPatch(
                (left, low),
                3.5,
                height,
                boxstyle="round,pad=0.05",
                facecolor="none",
                edgecolor=colour,
            )
        )
        axes.text(left, 3.25, f"worker {worker}: a slice of {count} devices", color=colour)
        for device, (held, rows) in enumerate(zip(each["kernels"], each["examples"], strict=True)):
            x, y = left + 0.1 + 1.75 * (device % 2), 2.9 - 1.35 * (device // 2)
            cells(axes, (x, y - 0.2), KERNEL, held, colour)
            cells(axes, (x + 1.0, y - 0.2), (EXAMPLES, 4), [rows, [0, 4]], style.COLOURS[4])
            axes.text(x, y - 0.13, f"data {device // 2}, model {device % 2}", fontsize=8.5)
    axes.annotate("", (4.55, 2.4), (3.6, 2.4), arrowprops={"arrowstyle": "<->"})
    axes.text(4.08, 2.52, "sums", ha="center", fontsize=8.5)
    axes.text(
        4.0,
        -0.05,
        "coloured: what a device has of a kernel of 8 by 8, and of a microbatch of 4 examples",
        ha="center",
        fontsize=9,
    )
    axes.set(xlim=(-0.2, 8.3), ylim=(-0.2, 3.5))
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


if __name__ == "__main__":
    style.write(numbers(), draw, "slices")
