"""Train while ranks may be lost or join: the loop of an elastic strategy (gossip).

When a rank is lost, the others form a new group (comm/elastic) and continue from the largest step any of them reached.
Each keeps its players; all that depends on the other ranks (role, communication graph, lanes, stats) is rebuilt. A rank
that joins asks for admission, is admitted at the next line of stats, and gets its players from the first rank that has
them. If too few ranks are left, each writes a checkpoint and stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from paragan.comm import checkpoint_files
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
    """Raised when ranks were admitted: training continues with another membership."""

    def __init__(self, membership: Membership):
        super().__init__()
        self.membership = membership


@dataclass
class ElasticTrainer:
    """Trains with the ranks that are present.

    rebind : rebuilds the parts of a session that depend on the other ranks
    """

    world: ElasticWorld
    run_dir: RunDir
    dataset: Dataset
    console: RunConsole
    checkpoint_callback: CheckpointCallback
    rebind: Callable[[Session], Session]
    _without_state: bool = field(default=False, init=False)  # this rank has no parameters yet

    def train(self, session: Session, callbacks: list[Callback], on_finish: Callback) -> None:
        """Train until the clock is done, in spite of ranks that are lost or join.

        Args:
            on_finish: called again at the end if a rank was lost while the end of the run was written.

        Raises:
            Interrupted: too few ranks are left; a checkpoint was written.
        """
        world = self.world
        members = world.membership.members
        world.started = True
        self._without_state = world.joined_late
        new_membership = world.membership if world.joined_late else None
        self._become_main(session)
        world.close_rendezvous()
        with report_errors(session), StopCoordinator(world) as stop:
            while True:
                try:
                    if new_membership:
                        session = self._adopt_membership(session, new_membership)
                        self._log_membership(session, new_membership, members)
                        members = new_membership.members
                        new_membership = None
                        stop.attach_to_world()
                        if session.clock.is_done:
                            on_finish(session)
                    run_rounds(session, [*callbacks, self._admit_joiners], self.checkpoint_callback.save, stop)
                    return
                except _MembershipChanged as change:
                    new_membership = change.membership
                except CommunicationError as error:
                    new_membership = self._continue_without(session, error)

    def _admit_joiners(self, session: Session) -> None:
        """Callback: admit the ranks that asked to join, every tick."""
        if has_crossed_kimg(session, session.run.output.tick_kimg) and not session.clock.is_done:
            membership = self.world.admit(session.clock.step)
            if membership:
                raise _MembershipChanged(membership)

    def _continue_without(self, session: Session, error: CommunicationError) -> Membership:
        """Form a group of the ranks that are left. If they are too few, write a checkpoint and raise Interrupted."""
        try:
            return self.world.reform(-1 if self._without_state else session.clock.step)
        except QuorumLostError as quorum_error:
            if self._without_state:
                raise
            membership = self.world.membership
            session = self._adopt_membership(session, membership)
            suffix = ""
            if membership.partitioned:  # other ranks may be training on: they must not find this checkpoint
                suffix = "-ranks-" + "-".join(map(str, membership.members))
            path = self.checkpoint_callback.save(session, suffix)
            step = session.clock.step
            message = f"rank {self.world.original_rank}, step {step}: {quorum_error}; stopped with checkpoint {path}"
            if suffix:
                message += f" (other ranks may be continuing this run; if none is, rename it to {step:08d})"
            raise Interrupted(message, same_on_all_ranks=not self.world.is_main) from error

    def _adopt_membership(self, session: Session, membership: Membership) -> Session:
        """Return this rank's session for a membership. The state of exchanges is dropped: their links are gone."""
        clock = session.clock
        self._without_state = self.world.original_rank in membership.without_state
        clock.step = membership.step
        clock.images = membership.step * session.run.round_images
        for player in session.game.players:
            player.abort_exchange()
            player.flat.load_states({})
        send_state_to_joiners(session.game, self.world, membership)
        self._without_state = False
        self.checkpoint_callback.forget_saved_step()
        session = self.rebind(session)
        self._become_main(session)
        return session

    def _become_main(self, session: Session) -> None:
        """Let the first member own the folder and the console, and publish the addresses of the members."""
        world = self.world
        self.console.set_enabled(world.is_main)
        if world.membership.partitioned:
            return
        if world.is_main:
            self.run_dir.lock()  # may fail: a frozen rank may still hold it
            self.run_dir.write_members(world.membership.addresses, self.dataset.fingerprint)
            self.console.start(session.clock.kimg, session.run.total_images / 1000)
        else:
            self.run_dir.release()

    def _log_membership(self, session: Session, membership: Membership, previous_members: Iterable[int]) -> None:
        """Append a line to members.jsonl and print one."""
        if not self.world.is_main:
            return
        members = list(membership.members)
        lost = sorted(set(previous_members) - set(members))
        joined = list(membership.without_state)
        kimg = session.clock.kimg
        row = {"kimg": kimg, "step": membership.step, "members": members, "lost": lost, "joined": joined}
        JsonlFile(self.run_dir.path / "members.jsonl").append(row)
        changes: list[str] = []
        if lost:
            changes.append(f"rank {_format_ranks(lost)} lost")
        if joined:
            changes.append(f"rank {_format_ranks(joined)} joined")
        self.console.print(
            f"{kimg:.1f} kimg: {', '.join(changes) or 'a link broke'}; going on with rank {_format_ranks(members)}"
        )


def send_state_to_joiners(game: Game, world: ElasticWorld, membership: Membership) -> None:
    """Send the players of the first member that has them to the members that joined. All members call this."""
    members = membership.members
    joiners = membership.without_state
    if not joiners:
        return
    sender = next(rank for rank in members if rank not in joiners)
    length = torch.zeros(1, dtype=torch.int64)
    if world.original_rank == sender:
        state = {name: t for player in game.players for name, t in checkpoint.player_state(player).items()}
        data = torch.frombuffer(bytearray(checkpoint_files.to_bytes(state)), dtype=torch.uint8)
        receivers = [members.index(rank) for rank in joiners]
        world.all_ranks.send_recv(dict.fromkeys(receivers, length.fill_(len(data))), {}).wait()
        world.all_ranks.send_recv(dict.fromkeys(receivers, data), {}).wait()
    elif world.original_rank in joiners:
        source = members.index(sender)
        world.all_ranks.send_recv({}, {source: length}).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        world.all_ranks.send_recv({}, {source: data}).wait()
        tensors = checkpoint_files.from_bytes(data.numpy().tobytes())
        for player in game.players:
            checkpoint.restore_player(player, tensors)


def _format_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
