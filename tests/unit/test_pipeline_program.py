"""What a program of phases holds while it is computed."""

import weakref

from bigsgan.engines.pipeline.program import Program
from bigsgan.engines.pipeline.schedule import Cost, Phase


class Run:
    """A phase whose tasks take note of which of some objects are alive."""

    def __init__(self, phase, watched=(), seen=None):
        self.phase, self._watched, self._seen = phase, watched, seen

    def expect(self, task):
        pass

    def receive(self, task):
        pass

    def compute(self, task):
        if self._seen is not None:
            self._seen.append([reference() is not None for reference in self._watched])

    @property
    def settle(self):
        return list


def test_a_phase_that_is_computed_is_let_go():
    program = Program(0, 1, {"generator": [Cost(1.0, 2.0)]}, joint=True)
    first, second = (Run(Phase("generator", 2, 1, True, False)) for _ in range(2))
    watched, seen = [weakref.ref(first), weakref.ref(second)], []
    program.add(first)
    program.add(second)
    program.add(Run(Phase("generator", 1, 1, True, False), watched, seen))
    del first, second
    program.flush()
    assert seen == [[False, False]]
    assert [reference() for reference in watched] == [None, None]
