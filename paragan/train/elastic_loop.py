"""What a run does when ranks are lost or come back: the players of those who are there stay, and everything that has to
do with the others - group, graph, lanes - is made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from paragan.comm.elastic.elastic_world import ElasticWorld, QuorumLostError
from paragan.comm.elastic.membership import Membership
from paragan.comm.process_group import CommunicationError
from paragan.core.errors import Interrupted
from paragan.core.jsonl import JsonlFile
from paragan.data.dataset import Dataset
from paragan.game.game import Game
from paragan.train import checkpoint
from paragan.train.callbacks.save import CheckpointCallback
from paragan.train.console import RunConsole
from paragan.train.loop import report_errors, run_rounds
from paragan.train.run_dir import RunDir
from paragan.train.session import Callback, Session, has_crossed_kimg
from paragan.train.shutdown import StopCoordinator


class _MembershipChanged(Exception):
    """Members let somebody in: play goes on in another formation."""

    def __init__(self, membership: Membership):
        super().__init__()
        self.membership = membership


@dataclass
class ElasticTrainer:
    """Those who play, and what they write where; `seat` makes what a session has of its world."""

    world: ElasticWorld
    run_dir: RunDir
    dataset: Dataset
    console: RunConsole
    checkpoint_callback: CheckpointCallback
    rebind: Callable[[Session], Session]
    _without_state: bool = field(default=False, init=False)  # this rank has no parameters yet

    def train(self, session: Session, callbacks: list[Callback], on_finish: Callback) -> None:
        """`train`, with whoever is there. Interrupted, with a checkpoint, where too few are left."""
        world, here = self.world, self.world.membership.members
        world.started = True
        self._without_state = world.joined_late
        news = world.membership if world.joined_late else None
        self._become_main(session)
        with report_errors(session), StopCoordinator(world) as stop:
            while True:
                try:
                    if news:
                        session = self._adopt_membership(session, news)
                        self._log_membership(session, news, here)
                        here, news = news.members, None
                        stop.attach_to_world()
                        if session.clock.is_done:
                            on_finish(session)
                    run_rounds(session, [*callbacks, self._admit_joiners], self.checkpoint_callback.save, stop)
                    return
                except _MembershipChanged as door:
                    news = door.membership
                except CommunicationError as error:
                    news = self._continue_without(session, error)

    def _admit_joiners(self, session: Session) -> None:
        """An observer: lets in who knocked, every tick."""
        if has_crossed_kimg(session, session.run.output.tick_kimg) and not session.clock.is_done:
            formation = self.world.admit(session.clock.step)
            if formation:
                raise _MembershipChanged(formation)

    def _continue_without(self, session: Session, error: CommunicationError) -> Membership:
        """Those who are left, if they are enough: else they write what is there."""
        try:
            return self.world.reform(-1 if self._without_state else session.clock.step)
        except QuorumLostError as alone:
            formation = self.world.membership
            if self._without_state:
                raise
            session = self._adopt_membership(session, formation)
            private = "-ranks-" + "-".join(map(str, formation.members)) if formation.partitioned else ""
            path = self.checkpoint_callback.save(session, private)
            others = "others may be going on with this run, or if none is, rename it"
            advice = f" ({others} to {session.clock.step:08d})" if private else ""
            me, step = self.world.original_rank, session.clock.step
            what = f"rank {me}, step {step}: {alone}; stopped with checkpoint {path}{advice}"
            raise Interrupted(what, same_on_all_ranks=not self.world.is_main) from error

    def _adopt_membership(self, session: Session, membership: Membership) -> Session:
        """This rank's session in a formation. What exchanges remember is dropped: those links are no more."""
        clock, self._without_state = session.clock, self.world.original_rank in membership.without_state
        clock.step, clock.images = membership.step, membership.step * session.run.round_images
        for player in session.game.players:
            player.flat.abort()
            player.flat.load_states({})
        send_state_to_joiners(session.game, self.world, membership)
        self._without_state = False
        self.checkpoint_callback.forget_saved_step()
        session = self.rebind(session)
        self._become_main(session)
        return session

    def _become_main(self, session: Session) -> None:
        """The first of those who are there speaks, owns the folder, and says where the members are found."""
        world = self.world
        self.console.set_enabled(world.is_main)
        if world.membership.partitioned:
            return
        if world.is_main:
            self.run_dir.lock()  # a frozen rank may hold it yet
            self.run_dir.write_members(world.membership.addresses, self.dataset.fingerprint)
            self.console.start(session.clock.kimg, session.run.total_images / 1000)
        else:
            self.run_dir.release()

    def _log_membership(self, session: Session, membership: Membership, previous_members: Iterable[int]) -> None:
        """A line of members.jsonl, and one on the screen."""
        if not self.world.is_main:
            return
        lost, joined = sorted(set(previous_members) - set(membership.members)), list(membership.without_state)
        kimg, members = session.clock.kimg, list(membership.members)
        row = {"kimg": kimg, "step": membership.step, "members": members, "lost": lost, "joined": joined}
        JsonlFile(self.run_dir.path / "members.jsonl").append(row)
        news = [f"rank {_format_ranks(ranks)} {verb}" for ranks, verb in ((lost, "lost"), (joined, "joined")) if ranks]
        self.console.print(
            f"{kimg:.1f} kimg: {', '.join(news) or 'a link broke'}; going on with rank {_format_ranks(members)}"
        )


def send_state_to_joiners(game: Game, world: ElasticWorld, membership: Membership) -> None:
    """Those who have no parameters get all that a player is from the first who has."""
    members, empty = membership.members, membership.without_state
    if not empty:
        return
    giver = next(r for r in members if r not in empty)
    length = torch.zeros(1, dtype=torch.int64)
    if world.original_rank == giver:
        state = {name: t for player in game.players for name, t in checkpoint.player_state(player).items()}
        data = torch.frombuffer(bytearray(checkpoint.to_bytes(state)), dtype=torch.uint8)
        told = [members.index(r) for r in empty]
        world.all_ranks.send_recv(dict.fromkeys(told, length.fill_(len(data))), {}).wait()
        world.all_ranks.send_recv(dict.fromkeys(told, data), {}).wait()
    elif world.original_rank in empty:
        heard = members.index(giver)
        world.all_ranks.send_recv({}, {heard: length}).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        world.all_ranks.send_recv({}, {heard: data}).wait()
        tensors = checkpoint.from_bytes(data.numpy().tobytes())
        for player in game.players:
            checkpoint.restore_player(player, tensors)


def _format_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
