"""What a run does when ranks are lost or come back: the players of those who are there stay, and everything that has to
do with the others - group, graph, lanes - is made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from paragan.comm.elastic.elastic_world import Alone, Elastic
from paragan.comm.elastic.membership import Formation
from paragan.comm.process_group import Lost
from paragan.core.errors import Interrupted
from paragan.core.jsonl import Records
from paragan.data.dataset import Images
from paragan.game.game import Game
from paragan.train import checkpoint
from paragan.train.callbacks.save import Save
from paragan.train.console import Screen
from paragan.train.loop import explained, rounds
from paragan.train.run_dir import RunFolder
from paragan.train.session import Observer, Session, every
from paragan.train.shutdown import Stop


class _Admitted(Exception):
    """Members let somebody in: play goes on in another formation."""

    def __init__(self, formation: Formation):
        super().__init__()
        self.formation = formation


@dataclass
class Table:
    """Those who play, and what they write where; `seat` makes what a session has of its world."""

    world: Elastic
    folder: RunFolder
    images: Images
    screen: Screen
    save: Save
    seat: Callable[[Session], Session]
    _empty: bool = field(default=False, init=False)  # this rank has no parameters yet

    def play(self, session: Session, observers: list[Observer], finish: Observer) -> None:
        """`train`, with whoever is there. Interrupted, with a checkpoint, where too few are left."""
        world, here = self.world, self.world.formation.members
        world.under_way = True
        self._empty = world.late
        news = world.formation if world.late else None
        self._take_over(session)
        with explained(session), Stop(world) as stop:
            while True:
                try:
                    if news:
                        session = self._sit_down(session, news)
                        self._tell(session, news, here)
                        here, news = news.members, None
                        stop.renew()
                        if session.clock.done:
                            finish(session)
                    rounds(session, [*observers, self._door], self.save.save, stop)
                    return
                except _Admitted as door:
                    news = door.formation
                except Lost as error:
                    news = self._go_on(session, error)

    def _door(self, session: Session) -> None:
        """An observer: lets in who knocked, every tick."""
        if every(session, session.run.output.tick_kimg) and not session.clock.done:
            formation = self.world.admit(session.clock.step)
            if formation:
                raise _Admitted(formation)

    def _go_on(self, session: Session, error: Lost) -> Formation:
        """Those who are left, if they are enough: else they write what is there."""
        try:
            return self.world.again(-1 if self._empty else session.clock.step)
        except Alone as alone:
            formation = self.world.formation
            if self._empty:
                raise
            session = self._sit_down(session, formation)
            private = "-ranks-" + "-".join(map(str, formation.members)) if formation.private else ""
            path = self.save.save(session, private)
            others = "others may be going on with this run, or if none is, rename it"
            advice = f" ({others} to {session.clock.step:08d})" if private else ""
            me, step = self.world.identity, session.clock.step
            what = f"rank {me}, step {step}: {alone}; stopped with checkpoint {path}{advice}"
            raise Interrupted(what, everywhere=not self.world.first) from error

    def _sit_down(self, session: Session, formation: Formation) -> Session:
        """This rank's session in a formation. What exchanges remember is dropped: those links are no more."""
        clock, self._empty = session.clock, self.world.identity in formation.empty
        clock.step, clock.images = formation.step, formation.step * session.run.round
        for player in session.game.players:
            player.flat.give_up()
            player.flat.load_memories({})
        share_state(session.game, self.world, formation)
        self._empty = False
        self.save.again()
        session = self.seat(session)
        self._take_over(session)
        return session

    def _take_over(self, session: Session) -> None:
        """The first of those who are there speaks, owns the folder, and says where the members are found."""
        world = self.world
        self.screen.speak(world.first)
        if world.formation.private:
            return
        if world.first:
            self.folder.lock()  # a frozen rank may hold it yet
            self.folder.write_members(world.formation.addresses, self.images.fingerprint)
            self.screen.start(session.clock.kimg, session.run.images / 1000)
        else:
            self.folder.release()

    def _tell(self, session: Session, formation: Formation, before: Iterable[int]) -> None:
        """A line of members.jsonl, and one on the screen."""
        if not self.world.first:
            return
        lost, joined = sorted(set(before) - set(formation.members)), list(formation.empty)
        kimg, members = session.clock.kimg, list(formation.members)
        row = {"kimg": kimg, "step": formation.step, "members": members, "lost": lost, "joined": joined}
        Records(self.folder.path / "members.jsonl").append(row)
        news = [f"rank {_listed(ranks)} {verb}" for ranks, verb in ((lost, "lost"), (joined, "joined")) if ranks]
        self.screen.say(f"{kimg:.1f} kimg: {', '.join(news) or 'a link broke'}; going on with rank {_listed(members)}")


def share_state(game: Game, world: Elastic, formation: Formation) -> None:
    """Those who have no parameters get all that a player is from the first who has."""
    members, empty = formation.members, formation.empty
    if not empty:
        return
    giver = next(r for r in members if r not in empty)
    length = torch.zeros(1, dtype=torch.int64)
    if world.identity == giver:
        state = {name: t for player in game.players for name, t in checkpoint.player_state(player).items()}
        data = torch.frombuffer(bytearray(checkpoint.packed(state)), dtype=torch.uint8)
        told = [members.index(r) for r in empty]
        world.everyone.swap(dict.fromkeys(told, length.fill_(len(data))), {}).wait()
        world.everyone.swap(dict.fromkeys(told, data), {}).wait()
    elif world.identity in empty:
        heard = members.index(giver)
        world.everyone.swap({}, {heard: length}).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        world.everyone.swap({}, {heard: data}).wait()
        tensors = checkpoint.unpacked(data.numpy().tobytes())
        for player in game.players:
            checkpoint.restore(player, tensors)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
