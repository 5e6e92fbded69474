"""What a pipeline stage takes for tangents, as `python -m tests.benchmarks.pipeline_tangents` prints it.

Of the larger recipe of pipeline.py, in 2 stages that compute, with exact R1 in every update and without.
"""

import os
import statistics

from tests.benchmarks.pipeline import DS, KINDS, LARGER, awake, fresh_ranks, head, row, stages
from tests.distributed import scenarios


def main(num_updates=3):
    """Print what tasks of D take where it trains with tangents and without, of the larger recipe, which computes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    taken = []
    with fresh_ranks(2) as pool:
        pool.run(scenarios.train, [], DS, 1)
        for options in ([], ["objective.r1={weight: 1}"]):
            options = [*LARGER, *stages(2), "pipeline.schedule=phases", *options]
            by_rank = [found for found, _, _ in pool.run(awake, options, num_updates)]
            spans = [span for found in by_rank for update in found for span in update]
            taken.append([
                statistics.median(s.end - s.start for s in spans if (s.phase.label, s.task.kind) == ("D trains", kind))
                for kind in KINDS[:2]
            ])  # fmt: skip
    print("\nLarger recipe in 2 stages, awake: a task of D where it trains, median over stages and micro-batches:\n")
    head("kind", "ms without tangents", "with", "ratio", "planned")
    for kind, without, with_tangents in zip(KINDS, *taken, strict=False):
        row(kind, f"{1e3 * without:.1f}", f"{1e3 * with_tangents:.1f}", f"{with_tangents / without:.2f}", "2")


if __name__ == "__main__":
    main()
