"""Image grids as uint8, and as PNG files.

Shapes: n images, C channels, H x W pixels.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from bigsgan.images.codec import encode
from bigsgan.images.wide import viewable
from bigsgan.runtime.atomic import replacing
from bigsgan.runtime.paths import writing

_PADDING = 2  # black pixels around and between the images


def image_grid(images: Tensor, columns: int) -> Tensor:
    """Lay images out row by row on black, with 2 pixels around each.

    torchvision's make_grid is not used: it leaves out the padding when there is one image and makes three channels of
    one.

    Args:
        images: (n, C, H, W) with n >= 1, any float dtype, on any device; -1 is black and 1 is white. Values outside
            are clipped; NaN, which has no uint8, is drawn black. Unless C is 1 or 3, the first three channels are
            drawn, or the first.
        columns: Images in a row. Fewer images make one shorter row.

    Returns:
        uint8 (C, 2 + rows * (H + 2), 2 + columns * (W + 2)) on the host.
    """
    images = viewable(images)
    num, channels, height, width = images.shape
    columns = min(columns, num)
    rows = -(-num // columns)
    pixels = encode(images).cpu()
    cells = pixels.new_zeros(rows * columns, channels, height + _PADDING, width + _PADDING)
    cells[:num, :, _PADDING:, _PADDING:] = pixels
    cells = cells.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4)  # (C, rows, H + 2, columns, W + 2)
    grid = cells.reshape(channels, rows * (height + _PADDING), columns * (width + _PADDING))
    return F.pad(grid, (0, _PADDING, 0, _PADDING))


def save_png(grid: Tensor, path: Path) -> None:
    """Write a uint8 (C, H, W) image on the host, where C is 1 (grey), 3 or 4, to ``path``: whole or not at all.

    Raises:
        UserError: The file cannot be written.
    """
    array = grid.permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    with writing(path), replacing(path) as unfinished:
        image.save(unfinished, format="PNG")
