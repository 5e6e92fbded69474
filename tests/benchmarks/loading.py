"""How long an update waits for its images, where updates follow at a rate, in one run.

    python -m tests.benchmarks.loading [--rates 100,200,400] [--updates 40] [--workers 2] [--resolution 128]

Photographs of 500 x 375 pixels in class folders, and the same prepared by `bigsgan data prepare`, as files of that
resolution in one zip file. A device that computes is played by a process that takes the images of an update and then
sleeps for as long as an update takes at that rate, which leaves the cores to the loading processes. The share of the
time that it waited is what `data_wait` reports of a run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bigsgan.config.data import Data
from bigsgan.config.origin import find_origin
from bigsgan.data import RealImages, Slice, build_training_dataset, prepare
from bigsgan.draws import Draws
from bigsgan.images.size import Fitting, Size

BATCH, NUM_IMAGES, NUM_CLASSES, SIZE = 64, 512, 4, (500, 375)


def write_photographs(directory):
    """JPEG files as large as photographs are: smooth forms and fine grain."""
    generator = np.random.default_rng(0)
    for i in range(NUM_IMAGES):
        coarse = Image.fromarray(generator.integers(0, 255, (12, 16, 3), dtype=np.uint8)).resize(SIZE, Image.BICUBIC)
        grain = generator.normal(0, 12, (*SIZE[::-1], 3))
        path = directory / f"{i % NUM_CLASSES}" / f"{i:04}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return sum(path.stat().st_size for path in directory.rglob("*.jpg")) / NUM_IMAGES


def measure(data, rate, updates):
    """Images a second, and the share of the time that was spent waiting for them."""
    dataset, cpu = build_training_dataset(data), torch.device("cpu")
    reals = RealImages(dataset, data, Draws(0), Slice(BATCH, 1, 0, 1), cpu)
    reals.next_phase()  # the loading processes start
    time.sleep(1)
    start, waited = time.perf_counter(), reals.waited_seconds
    for _ in range(updates):
        reals.next_phase()
        time.sleep(BATCH / rate)
    seconds = time.perf_counter() - start
    share = (reals.waited_seconds - waited) / seconds
    reals.close()
    return updates * BATCH / seconds, share


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="100,200,400")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resolution", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        photographs, packed = Path(directory) / "photographs", Path(directory) / "packed.zip"
        photographs.mkdir()
        size = write_photographs(photographs)
        fitting = Fitting(Size.of(options.resolution))
        prepare.main(find_origin(photographs, fitting, {}), packed, "zip", options.workers)
        print(f"photographs of {size / 1e3:.0f} kB, {options.workers} loading processes, updates of {BATCH} images")
        print("| images | asked, images/s | reached | waited |")
        print("| --- | ---: | ---: | ---: |")
        for name, kind, root in (("photographs", "folder", photographs), ("prepared", "zip", packed)):
            for rate in map(float, options.rates.split(",")):
                data = Data(
                    kind=kind,
                    root=str(root),
                    resolution=options.resolution,
                    image_channels=3,
                    num_classes=NUM_CLASSES,
                    horizontal_flip=True,
                    num_workers=options.workers,
                )
                reached, share = measure(data, rate, options.updates)
                print(f"| {name} | {rate:.0f} | {reached:.0f} | {100 * share:.2f} % |", flush=True)


if __name__ == "__main__":
    main()
