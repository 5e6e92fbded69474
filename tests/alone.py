"""The collectives of a single rank, for checkpoints without a process group."""


class Alone:
    """The collectives of a single rank."""

    def rank(self) -> int:
        return 0

    def world_size(self) -> int:
        return 1

    def barrier(self) -> None:
        pass

    def any_rank(self, flag: bool) -> bool:
        return flag
