"""Random views of images, for `hetjax.augmented`."""

from typing import Any

import numpy as np


def crops_and_flips(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The image, moved by up to an eighth of its size over zeros, and mirrored every second time.

    Of CIFAR's 32 pixels that is the crop of an image padded by 4 that ResNets are trained with.

    Args:
        example: `{"image": [H, W, C], …}`.
        rng: of this example and epoch.

    Example:
        >>> example = {"image": np.arange(64.0).reshape(8, 8, 1), "label": 3}
        >>> crops_and_flips(example, np.random.default_rng(0))["image"].shape
        (8, 8, 1)

    References:
        He, Zhang, Ren, Sun, "Deep residual learning for image recognition", 2015, arXiv 1512.03385.
    """
    image = np.asarray(example["image"])
    height, width = image.shape[:2]
    by = (height // 8, width // 8)
    padded = np.pad(image, ((by[0],) * 2, (by[1],) * 2, (0, 0)))
    top, left = rng.integers(0, 2 * by[0] + 1), rng.integers(0, 2 * by[1] + 1)
    view = padded[top : top + height, left : left + width]
    return {**example, "image": view[:, ::-1] if rng.random() < 0.5 else view}


AUGMENTATIONS = {"crops_and_flips": crops_and_flips}
