"""Output of a run: running means, reports, progress and logs."""

from bigsgan.monitor.logs import NOTICE, RankLog, open_rank_log
from bigsgan.monitor.reporter import Reporter
from bigsgan.monitor.statistics import Statistics
from bigsgan.monitor.wandb_run import check_wandb

__all__ = ["NOTICE", "RankLog", "Reporter", "Statistics", "check_wandb", "open_rank_log"]
