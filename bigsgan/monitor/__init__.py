"""Output of a run: running means, reports, image grids, progress and logs."""

from bigsgan.monitor.grids import image_grid, save_png
from bigsgan.monitor.logs import NOTICE, RankLog, open_rank_log
from bigsgan.monitor.reporter import Reporter
from bigsgan.monitor.statistics import Statistics

__all__ = ["NOTICE", "RankLog", "Reporter", "Statistics", "image_grid", "open_rank_log", "save_png"]
