"""No rank waits for ever, even if each task waits for all that the rank has sent and got ready for.

On a GPU a message that is under way holds up whatever waits for the device: the first use of a kernel, memory that is
freed, a new connection. These ranks wait so before every task, and the sender of a message waits too. All messages of
a rank, of all communicators, are under way one after the other, in the order in which it sends and gets ready for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import product

import pytest

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.exchange import messages
from bigsgan.engines.orders import Order, Turn
from bigsgan.engines.phases import Phase, Task, game_of, update_phases
from bigsgan.engines.pipeline.schedule import Cost
from bigsgan.engines.tasks import in_turn
from tests.tiny import both, stages, tiny_plan

G, D = NETWORKS
Channel = tuple[str, int, int]
"""What goes through it, from which rank, to which."""

SENDERS = [("G makes images", "forward"), ("D judges", "backward")]
"""Phases and passes whose outputs the other network reads."""


@dataclass
class Ranks:
    """The ranks of a run, one update of which they compute as far as they can."""

    plan: RunPlan
    phases: list[Phase]
    turns: list[list[Turn]]
    sent: dict[Channel, list[Task]] = field(default_factory=lambda: defaultdict(list))
    ready: dict[Channel, list[Task]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.at = [0] * len(self.turns)
        self.is_ready = [False] * len(self.turns)
        self.num_read = Counter[Channel]()
        self.under_way: list[deque[tuple[Channel, int]]] = [deque() for _ in self.turns]  # by rank

    def play(self) -> list[tuple[int, Task]]:
        """Compute; return who stands before which task in the end."""
        moved = True
        while moved:
            moved = False
            for rank, turns in enumerate(self.turns):
                if self.has_more(rank) and not self.is_ready[rank]:
                    self.get_ready(rank, turns)
                    moved = True
            for rank in range(len(self.turns)):
                if self.has_more(rank) and all(map(self.can_begin, meeting := self.meeting(rank))):
                    for other in meeting:
                        self.compute(other)
                    moved = True
        return [
            (rank, turns[self.at[rank]].task) for rank, turns in enumerate(self.turns) if self.at[rank] < len(turns)
        ]

    def get_ready(self, rank: int, turns: list[Turn]) -> None:
        before = [turn.task for turn in turns[: self.at[rank]]]
        for task in turns[self.at[rank]].receives:
            assert task not in before, "it is received after it has been read"
            for channel, message in self.read_by(rank, task):
                self.under_way[rank].append((channel, len(self.ready[channel])))
                self.ready[channel].append(message)
        self.is_ready[rank] = True
        self.deliver(rank)

    def deliver(self, rank: int) -> None:
        """Let messages arrive that are the next of both their ranks, from this one on."""
        ranks = [rank]
        while ranks:
            own = self.under_way[ranks.pop()]
            if own and all(self.under_way[end] and self.under_way[end][0] == own[0] for end in own[0][0][1:]):
                ends = own[0][0][1:]
                for end in ends:
                    self.under_way[end].popleft()
                ranks += ends

    def meeting(self, rank: int) -> list[int]:
        """The ranks that compute a task together: all of a network at a step, and else the replicas of a stage."""
        placement, task = self.placement(rank), self.turns[rank][self.at[rank]].task
        if task.kind == "step":
            return [*placement.ranks]
        return [placement.rank(placement.stage(rank), replica) for replica in range(placement.num_replicas)]

    def can_begin(self, rank: int) -> bool:
        """Whether nothing of a rank is under way; and whether those that it meets stand before the same task."""
        others = [self.turns[other][self.at[other]].task for other in self.meeting(rank) if self.has_more(other)]
        if len(others) < len(self.meeting(rank)) or len(set(others)) > 1 or not self.is_ready[rank]:
            return False
        return not self.under_way[rank]

    def has_more(self, rank: int) -> bool:
        return self.at[rank] < len(self.turns[rank])

    def placement(self, rank: int):
        return self.plan.placement(self.phases[self.turns[rank][self.at[rank]].task.phase].network)

    def compute(self, rank: int) -> None:
        task = self.turns[rank][self.at[rank]].task
        for channel, message in self.read_by(rank, task):
            assert self.sent[channel][self.num_read[channel]] == message, "another message arrived first"
            self.num_read[channel] += 1
        for channel, message in self.sent_by(rank, task):
            self.under_way[rank].append((channel, len(self.sent[channel])))
            self.sent[channel].append(message)
        self.at[rank] += 1
        self.is_ready[rank] = False
        self.deliver(rank)

    def ends(self) -> tuple[list, list]:
        return self.plan.placement(G).output_ranks(), self.plan.placement(D).input_ranks()

    def read_by(self, rank: int, task: Task):
        """The messages that a task reads: from the stage before it, or of the other network."""
        phase = self.phases[task.phase]
        placement, stage = self.plan.placement(phase.network), self.plan.placement(phase.network).stage(rank)
        if task.kind == "step":
            return
        step = 1 if task.kind == "forward" else -1
        if 0 <= stage - step < placement.num_stages:
            source = placement.rank(stage - step, placement.replica(rank))
            yield (f"{phase.network} {task.kind}", source, rank), task
        elif self.plan.images_travel:
            number = self.source(task)
            readers = (turn.task for turn in self.turns[rank] if turn.task[1:] == task[1:])
            if number is not None and task == next(each for each in readers if self.source(each) == number):
                yield from self.travelling(task._replace(phase=number), target=rank)

    def source(self, task: Task) -> int | None:
        """The phase of the other network whose outputs a task reads."""
        phase = self.phases[task.phase]
        number = {"forward": phase.images_from, "backward": phase.grads_from, "step": None}[task.kind]
        return None if number is None or self.phases[number].network == phase.network else number

    def sent_by(self, rank: int, task: Task):
        phase = self.phases[task.phase]
        placement, stage = self.plan.placement(phase.network), self.plan.placement(phase.network).stage(rank)
        if task.kind == "step" or phase.only_on is not None:  # such phases are one stage's
            return
        step = 1 if task.kind == "forward" else -1
        if 0 <= stage + step < placement.num_stages:
            target = placement.rank(stage + step, placement.replica(rank))
            yield (f"{phase.network} {task.kind}", rank, target), task
        elif self.plan.images_travel and (phase.label, task.kind) in SENDERS:
            yield from self.travelling(task, source=rank)

    def travelling(self, task: Task, **end: int):
        makers, judges = self.ends()
        pairs = messages(makers, judges) if task.kind == "forward" else messages(judges, makers)
        for source, target, *_ in pairs:
            if source != target and {"source": source, "target": target}.items() >= end.items():
                yield (f"seam {task.kind}", source, target), task


LAYOUTS = {
    "2 + 2": (2, stages(2, 2), 1),
    "2 + 2, phases": (2, [*stages(2, 2), "pipeline.schedule=phases"], 1),
    "4 + 4": (4, stages(4, 4), 1),
    "4 + 4, phases": (4, [*stages(4, 4), "pipeline.schedule=phases"], 1),
    "2 + 2 of 2 replicas": (4, stages(2, 2), 1),
    "G in stages": (2, stages(2, 1), 1),
    "D in stages": (2, stages(1, 2), 1),
    "2 + 4": (4, stages(2, 4), 1),
    "4 + 2": (4, stages(4, 2), 1),
    "2 + 3": (12, stages(2, 3), 1),  # of 6 and 4 replicas: some ranks send to two, of which one sends to the other
    "3 + 2": (12, stages(3, 2), 1),
    "2 of 2 replicas + 1": (4, stages(2, 1), 1),
    "ranks of their own": (2, ["engines.generator.ranks=1"], 3),
    "ranks of their own, 2 + 4": (6, ["engines.generator.ranks=2"], 2),
    "ranks of their own, in stages": (4, ["engines.generator.ranks=2", *stages(2, 2)], 1),
    "ranks of their own, D in stages": (4, ["engines.generator.ranks=2", *stages(1, 2)], 1),
    "ranks of their own, G in stages": (4, ["engines.generator.ranks=2", *stages(2, 1)], 1),
}  # fmt: skip
GAMES = {
    "plain": [],
    "recompute": ["pipeline.generator_phase=recompute"],
    "two D steps and a penalty": ["objective.d_steps=2", "objective.r1={weight: 1, every: 2}"],
    "reused fakes": ["objective={reuse_fakes: true, d_steps: 2}"],
    "own accumulation": ["engines.discriminator.accumulation=4"],
    "a check": ["objective.r1={weight: 1, every: 2, form: finite_difference}"],
    "overlapped": ["objective.schedule=overlapped"],
    "adaptive weight": ["objective.adversarial.adaptive.parameter=x", "pipeline.generator_phase=recompute"],
    "adaptive weight, one micro-batch": [
        "objective.adversarial.adaptive.parameter=x",
        "engines.generator.accumulation=1",
        "pipeline.generator_phase=recompute",
    ],
    "normalized gradients": ["objective.adversarial.normalize.decay=0.5", "pipeline.generator_phase=recompute"],
    "adaptive weight, overlapped": [
        "objective={schedule: overlapped, adversarial: {adaptive: {parameter: x}}}",
        "pipeline.generator_phase=recompute",
    ],
    "path length": [
        "generator={family: stylegan2, latent_size: 8, w_size: 8, mapping_layers: 2, channel_base: 64, channel_max: 8}",
        "discriminator={family: stylegan2, channel_base: 64, channel_max: 8, mbstd_group: 1}",
        "objective={loss: non_saturating, path_length: {weight: 0.1, every: 2}}",
    ],
}  # fmt: skip


def updates(plan: RunPlan):
    """The updates of a game: with all lazy penalties and none, and the first of those that overlap."""
    for number, has_kept in product((0, 1), (False, True)):
        game = game_of(plan, number)
        yield update_phases(plan, [game.segments] * plan.recipe.objective.d_steps, game.regularizes, has_kept)


def ranks_of(plan: RunPlan, phases: list[Phase]) -> Ranks:
    costs = {n: [Cost(1.0 + 0.7 * s, 2.0 - 0.3 * s) for s in range(plan.placement(n).num_stages)] for n in NETWORKS}
    costs = {n: own for n, own in costs.items() if len(own) > 1}
    turns = []
    for rank in range(plan.world_size):
        stages_of = {network: plan.placement(network).stage(rank) for network in NETWORKS}
        held = {n: own for n, own in costs.items() if rank in plan.placement(n).ranks}  # others' are not known
        turns.append(Order(plan, stages_of, held)(phases))
    return Ranks(plan, phases, turns)


MIXED = ("2 + 2", "2 + 3", "2 of 2 replicas + 1", "ranks of their own, 2 + 4", "ranks of their own, in stages")
"""Layouts in which the quick tier plays all games; it plays the plain one in all layouts."""


@pytest.mark.parametrize(
    "layout, game",
    [
        pytest.param(layout, game, marks=() if game == "plain" or layout in MIXED else pytest.mark.slow)
        for layout, game in product(LAYOUTS, GAMES)
    ],
)
def test_no_rank_waits_for_ever(tmp_path, layout, game):
    world_size, options, stage = LAYOUTS[layout]
    plan = tiny_plan(tmp_path, world_size, ["batch=48", "accumulation=2", *GAMES[game], *options], both(stage))
    for phases in updates(plan):
        ranks = ranks_of(plan, phases)
        assert ranks.play() == []
        assert ranks.sent == ranks.ready  # each message was awaited, in the order in which it was sent
        assert sum(map(len, ranks.sent.values())) > 0


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("schedule", ["exact", "generator_first", "overlapped"])
def test_each_task_of_whole_networks_comes_once(tmp_path, game, schedule):
    options = ["batch=48", "accumulation=2", *(each for each in GAMES[game] if "schedule" not in each)]
    if not any(each.startswith("objective=") for each in options):
        options.append(f"objective.schedule={schedule}")
    plan = tiny_plan(tmp_path, 1, options, both(1))
    for phases in updates(plan):
        (turns,) = ranks_of(plan, phases).turns
        expected = [task for number, phase in enumerate(phases) for task in in_turn(number, phase)]
        assert sorted(turn.task for turn in turns) == sorted(expected)
        done = set[Task]()
        for task, _ in turns:  # and after what it reads
            phase = phases[task.phase]
            for source in {"forward": [phase.images_from], "backward": [phase.grads_from], "step": []}[task.kind]:
                kind = "forward" if task.kind == "forward" else "backward"
                assert source is None or Task(source, kind, task.micro_batch) in done
            done.add(task)


@pytest.mark.parametrize("schedule", ["joint", "phases"])
def test_ranks_that_get_ready_too_early_wait_for_ever(tmp_path, schedule):
    """Two tasks ahead of their own, as they once did: the next task of each waits for a message of the other."""
    options = ["batch=16", "accumulation=2", *stages(2, 2), f"pipeline.schedule={schedule}"]
    plan = tiny_plan(tmp_path, 2, options, both(1))
    ranks = ranks_of(plan, next(updates(plan)))
    for rank, turns in enumerate(ranks.turns):
        reads = [tuple(ranks.read_by(rank, turn.task)) for turn in turns]
        posted, early = 0, []
        for number, turn in enumerate(turns):
            ahead = [turns[n].task for n in range(posted, min(number + 3, len(turns))) if reads[n]]
            posted = max(posted, min(number + 3, len(turns)))
            early.append(Turn(turn.task, tuple(ahead)))
        ranks.turns[rank] = early
    assert len(ranks.play()) == 2
