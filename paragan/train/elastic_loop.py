"""Train while ranks may be lost or join: the loop of an elastic strategy.

When a rank is lost, the others form a new group (comm/elastic) and continue from a step that they agree on. All that
depends on the other ranks (role, communication graph, lanes, stats) is rebuilt. A rank that joins asks for admission,
is admitted at the next line of stats, and gets its players from the first rank that has them. If too few ranks are
left, each writes a checkpoint and stops.

What happens to the players depends on the strategy:

* gossip: each rank keeps its own, whatever came of the broken round, and exchanges start from zero.
* strategies that agree (`Strategy.replays_broken_rounds`): each rank returns to the end of its last complete round
  (round_snapshot.py), and the round is played again. Ranks that lack an agreement which others have completed get the
  players of one of those, as ranks that join do. What follows a round (lines, checkpoints, scores) is written again
  where it is incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from paragan.comm import checkpoint_files
from paragan.comm.compressed_allreduce import NonFiniteMessage
from paragan.comm.elastic.elastic_world import ElasticWorld, QuorumLostError
from paragan.comm.elastic.kv_store import ServerAddress
from paragan.comm.elastic.membership import Membership
from paragan.comm.process_group import CommunicationError
from paragan.core.errors import Interrupted
from paragan.core.jsonl import JsonlFile
from paragan.data.dataset import Dataset
from paragan.game.player import Player
from paragan.train import checkpoint
from paragan.train.callbacks.log import LogCallback, drop_lines_after
from paragan.train.callbacks.save import CheckpointCallback
from paragan.train.console import RunConsole
from paragan.train.loggers.logger_set import LoggerSet
from paragan.train.loop import report_errors, run_rounds
from paragan.train.members_file import write_members
from paragan.train.round_snapshot import RoundSnapshot, average_exchange_states, full_state
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
    log_callback: LogCallback
    checkpoint_callback: CheckpointCallback
    loggers: LoggerSet
    rebind: Callable[[Session], Session]
    _without_state: bool = field(default=False, init=False)  # this rank has no parameters yet
    _reported: set[ServerAddress] = field(default_factory=set[ServerAddress], init=False)  # that cannot be reached
    _snapshot: RoundSnapshot = field(default_factory=RoundSnapshot, init=False)  # not used where each keeps its own

    def train(self, session: Session, callbacks: list[Callback], write_interrupted: Callback) -> None:
        """Train until the clock is done, in spite of ranks that are lost or join.

        Args:
            write_interrupted: writes the checkpoint and scores of this step, if they are due. Called where each rank
                keeps its own players, and one was lost that may have interrupted them.

        Raises:
            Interrupted: too few ranks are left; a checkpoint was written.
        """
        world = self.world
        members = world.membership.members
        world.liveness.started = True
        self._without_state = world.joined_late
        new_membership = world.membership if world.joined_late else None
        replays = session.run.strategy.replays_broken_rounds
        if replays:
            callbacks = [self._snapshot.capture, *callbacks, self._snapshot.capture_tick]
        if replays and not self._without_state:
            self._snapshot.capture(session)
        self._become_main(session)
        world.close_rendezvous()
        with report_errors(session), StopCoordinator(world) as stop:
            while True:
                repeats = False
                try:
                    if new_membership:
                        session = self._adopt_membership(session, new_membership)
                        self._log_membership(session, new_membership, members)
                        members = new_membership.members
                        after_loss = new_membership.after_loss and session.clock.step > 0
                        repeats = replays and after_loss
                        new_membership = None
                        stop.attach_to_world()
                        if after_loss and not replays:
                            write_interrupted(session)
                    # A rank whose admission failed is admitted after another tick, so that training goes on.
                    every_round = [*callbacks, self._admit_joiners]
                    run_rounds(session, every_round, self.checkpoint_callback.save, stop, callbacks if repeats else ())
                    return
                except _MembershipChanged as change:
                    new_membership = change.membership
                except CommunicationError as error:
                    if replays and isinstance(error, NonFiniteMessage):
                        raise  # on all ranks: the round would break again
                    new_membership = self._continue_without(session, error, stop.reason, members)

    def _admit_joiners(self, session: Session) -> None:
        """Callback: admit the ranks that asked to join, every tick."""
        if has_crossed_kimg(session, session.run.output.tick_kimg) and not session.clock.is_done:
            if self.world.is_main:
                self.run_dir.lock()  # the rank that held it when this one became the main rank may be gone
            membership = self.world.admit(session.clock.step)
            self._print_unreachable()
            if membership:
                raise _MembershipChanged(membership)

    def _print_unreachable(self) -> None:
        """Say once which ranks ask to join and are not reached by this one."""
        for rank, address in self.world.unreachable_joiners.items():
            if address not in self._reported:
                self._reported.add(address)
                where = f"{address.host}:{address.port}"
                self.console.print(
                    f"rank {rank} asks to join, and rank {self.world.original_rank} cannot reach {where}"
                )

    def _continue_without(
        self, session: Session, error: CommunicationError, stop_reason: str, previous_members: Iterable[int]
    ) -> Membership:
        """Form a group of the ranks that are left. If they are too few, write a checkpoint and raise Interrupted.

        Args:
            stop_reason: why the run was asked to stop, which may be why others have ended; "" if it was not.
            previous_members: those before this loss.
        """
        strategy = session.run.strategy
        step = session.clock.step
        if strategy.replays_broken_rounds:
            step = self._snapshot.step
            self._without_state = step < 0
        try:
            return self.world.reform(-1 if self._without_state else step, strategy.num_agreements(max(step, 0)))
        except QuorumLostError as quorum_error:
            if self._without_state:
                raise
            membership = self.world.membership
            session = self._adopt_membership(session, membership)
            suffix = ""
            if membership.partitioned:  # other ranks may be training on: they must not find this checkpoint
                suffix = "-ranks-" + "-".join(map(str, membership.members))
            elif self.world.is_main:
                self._append_membership(session, membership, previous_members)
            path = self.checkpoint_callback.save(session, suffix)
            step = session.clock.step
            reason = f"{stop_reason}: {quorum_error}" if stop_reason else str(quorum_error)
            message = f"rank {self.world.original_rank}, step {step}: {reason}; stopped with checkpoint {path}"
            if suffix:
                message += f" (other ranks may be continuing this run; if none is, rename it to {step:08d})"
            raise Interrupted(message, same_on_all_ranks=not self.world.is_main) from error

    def _adopt_membership(self, session: Session, membership: Membership) -> Session:
        """Return this rank's session for a membership."""
        clock = session.clock
        players = session.game.players
        self._without_state = self.world.original_rank in membership.without_state
        clock.step = membership.step
        clock.images = session.run.images_after(membership.step)
        clock.last_round_images = session.run.current_round_images(clock.images - 1)
        for player in players:
            player.drop_round()
        if session.run.strategy.replays_broken_rounds:
            self._return_to_snapshot(session, membership)
        else:
            for player in players:
                player.flat.load_states({})  # the links of exchanges are gone
            send_state_to_joiners(players, self.world, membership)
        self._without_state = False
        self.checkpoint_callback.forget_saved_step()
        session = self.rebind(session)
        self._become_main(session)
        if session.run.strategy.replays_broken_rounds:
            self._continue_lines(session)
        return session

    def _return_to_snapshot(self, session: Session, membership: Membership) -> None:
        """Bring the players of all members to the end of the same round, or, with local steps, of the same period."""
        players = session.game.players
        has_own = self.world.original_rank not in membership.without_state
        if has_own:
            self._snapshot.restore(session)
        elif not membership.after_loss:
            self._snapshot.clear()  # the others have long gone on
        send_state_to_joiners(players, self.world, membership, with_exchanges=True)
        average_exchange_states(players, self.world, has_own)

    def _continue_lines(self, session: Session) -> None:
        """Continue the open tick, and let all ranks know which lines are written. All members call this."""
        clock = session.clock
        if self.world.is_main and not self.world.membership.partitioned:
            drop_lines_after(self.run_dir.path, clock.step, clock.kimg)
        session.stats.continue_tick(self._snapshot.tick, line_is_written=self.log_callback.find_last_step(session))
        self._snapshot.capture(session)

    def _become_main(self, session: Session) -> None:
        """Let the first member own the folder, console and loggers, and publish the addresses of the members."""
        world = self.world
        self.console.set_enabled(world.is_main)
        if not world.is_main or world.membership.partitioned:
            self.loggers.release()
        if world.membership.partitioned:
            return
        if world.is_main:
            self.run_dir.lock()  # may fail: a frozen rank may still hold it
            write_members(self.run_dir.path, world.membership.addresses, self.dataset.fingerprint)
            self.console.start(session.clock.kimg, session.run.total_images / 1000)
        else:
            self.run_dir.release()

    def _log_membership(self, session: Session, membership: Membership, previous_members: Iterable[int]) -> None:
        """Append a line to members.jsonl and print one."""
        if not self.world.is_main:
            return
        lost, joined = self._append_membership(session, membership, previous_members)
        changes: list[str] = []
        if lost:
            changes.append(f"rank {_format_ranks(lost)} lost")
        if joined:
            changes.append(f"rank {_format_ranks(joined)} joined")
        remaining = _format_ranks(membership.members)
        self.console.print(
            f"{session.clock.kimg:.1f} kimg: {', '.join(changes) or 'a link broke'}; going on with rank {remaining}"
        )

    def _append_membership(
        self, session: Session, membership: Membership, previous_members: Iterable[int]
    ) -> tuple[list[int], list[int]]:
        """Append a line to members.jsonl. Returns the ranks that were lost and that joined."""
        members = list(membership.members)
        previous = set(previous_members)
        lost = sorted(previous - set(members))
        joined = [r for r in membership.without_state if not (membership.after_loss and r in previous)]
        row = {"kimg": session.clock.kimg, "step": membership.step, "members": members, "lost": lost, "joined": joined}
        JsonlFile(self.run_dir.path / "members.jsonl").append(row)
        return lost, joined


def send_state_to_joiners(
    players: Sequence[Player], world: ElasticWorld, membership: Membership, with_exchanges: bool = False
) -> None:
    """Send the players of the first member that has them to the members that need them. All members call this.

    Args:
        players: of this rank.
        world: in `membership`.
        membership: says who needs them.
        with_exchanges: whether to send the state of exchanges too.
    """
    members = membership.members
    joiners = membership.without_state
    if not joiners:
        return
    sender = next(rank for rank in members if rank not in joiners)
    length = torch.zeros(1, dtype=torch.int64)
    if world.original_rank == sender:
        state = full_state(players, with_exchanges)
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
        for player in players:
            checkpoint.restore_player(player, tensors)


def _format_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
