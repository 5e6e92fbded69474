"""Output of a run: running means, reports, progress and logs."""

from bigsgan.monitor.logs import NOTICE, RankLog, open_rank_log
from bigsgan.monitor.reporter import Reporter
from bigsgan.monitor.statistics import Statistics

__all__ = ["NOTICE", "RankLog", "Reporter", "Statistics", "open_rank_log"]
