import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.utils import make_grid

from bigsgan.errors import UserError
from bigsgan.images.grids import image_grid, save_png


def random_images(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("num, columns", [(6, 3), (7, 3), (2, 5), (10, 10)])
def test_the_grid_is_that_of_torchvision(num, columns):
    images = random_images(num, 3, 5, 4)
    expected = make_grid(torch.round((images.double() + 1) / 2 * 255), nrow=columns, padding=2)
    grid = image_grid(images, columns)
    assert grid.dtype == torch.uint8
    torch.testing.assert_close(grid.double(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_one_image_is_padded_and_keeps_its_channels(channels):
    grid = image_grid(torch.ones(1, channels, 3, 4), columns=8)
    expected = torch.zeros(channels, 7, 8, dtype=torch.uint8)
    expected[:, 2:5, 2:6] = 255
    torch.testing.assert_close(grid, expected, rtol=0, atol=0)


def test_values_are_rounded_and_clipped_and_nan_is_black():
    values = torch.tensor([-1.0, 1.0, 0.5, -0.999, 3.0, -3.0, float("nan"), float("inf"), float("-inf")])
    grid = image_grid(values.reshape(1, 1, 1, 9), columns=1)
    # 0.5 is (0.5 + 1) * 127.5 = 191.25; -0.999 is 0.1275.
    assert grid[0, 2, 2:-2].tolist() == [0, 255, 191, 0, 255, 0, 0, 255, 0]


def test_bfloat16_images_are_computed_in_float32():
    images = random_images(4, 3, 8, 8).bfloat16()
    expected = torch.round((images[0].double() + 1) * 127.5)
    torch.testing.assert_close(image_grid(images, 4)[:, 2:10, 2:10].double(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("channels, mode", [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_a_png_reads_back_with_the_same_pixels(tmp_path, channels, mode):
    shape = (channels, 6, 9)
    grid = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    path = tmp_path / "grid.png"
    path.write_text("an older file")
    save_png(grid, path)
    with Image.open(path) as image:
        assert (image.format, image.mode, image.size) == ("PNG", mode, (9, 6))
        pixels = np.asarray(image).reshape(6, 9, channels)
    np.testing.assert_array_equal(pixels, grid.permute(1, 2, 0).numpy())
    assert [entry.name for entry in tmp_path.iterdir()] == ["grid.png"]


def test_a_failed_write_leaves_the_older_png_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "grid.png"
    save_png(torch.zeros(3, 4, 4, dtype=torch.uint8), path)
    before = path.read_bytes()

    def disk_full(image, file, format):
        file.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", disk_full)
    with pytest.raises(UserError, match="cannot be written: No space left on device") as caught:
        save_png(torch.ones(3, 4, 4, dtype=torch.uint8), path)
    assert caught.value.field == str(path)
    assert path.read_bytes() == before
