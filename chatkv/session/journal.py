"""The turns of one open conversation: in the file where that can be written, in memory until then.

A full disk or a folder without permission must not end a conversation. What could not be committed
stays here, is said once, and is written with the next thing that is, in the order in which it was
said.
"""

from __future__ import annotations

import time
from array import array
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from chatkv.errors import ChatkvError
from chatkv_store.errors import SessionNotFound, StoreBusy, StoreError
from chatkv_store.ulid import ulid_after

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatkv.session.reading import Reader
    from chatkv_store.conversations import Conversations, Session, Turn


class Journal:
    """Begins, checkpoints and finishes turns of `session`; holds its lease until it is closed.

    Raises StoreBusy where another process has the session open, and nothing else of the store's.
    `notices` are lines for the user that were not shown yet.
    """

    def __init__(self, conversations: Conversations, session: Session) -> None:
        self.conversations = conversations
        self.session = session
        self.turns: list[Turn] = []
        self.notices: list[str] = []
        self._unsaved: list[Turn] = []
        self._left: list[Turn] = []  # behind, by going back
        self._reader: Reader | None = None
        self._read: list[Turn] = []  # with ids that the file lacks still
        self._is_failing = False
        self._is_new = False  # in no file yet: a session is written with its first turn
        self._open = ExitStack()
        self._is_leased = False
        with suppress(SessionNotFound):
            self.turns = conversations.chain(session.id)
        self._try_to_hold()

    @property
    def num_unsaved(self) -> int:
        """Turns whose newest state is in memory only."""
        return len(self._unsaved)

    def close(self) -> None:
        """Write what can be written, and give the lease back."""
        try:
            self.save()
        finally:
            self._open.close()

    def read_with(self, reader: Reader) -> None:
        """Have ids made for turns that were imported as words; they are written with the next turn.

        Raises what `Reader.read` does, with nothing changed."""
        self._reader = reader
        self._take(self.turns)

    def _take(self, turns: list[Turn]) -> None:
        """Go on from `turns`, each with ids."""
        read = self._reader.read(self.session, turns) if self._reader is not None else turns
        self._read = [new for new, old in zip(read, turns, strict=True) if new is not old]
        self.turns = read

    def draws_of(self, seed: int) -> int:
        """How many random numbers of this seed were drawn so far: another answer to the same
        question is another answer."""
        drawn = (turn.rng_draws_after for turn in (*self.turns, *self._left) if turn.seed == seed)
        return max(drawn, default=0)

    def rewind(self, num_turns: int) -> None:
        """Go on from behind the first num_turns turns; the others stay in the file as a branch.

        Raises StoreError where that cannot be written: nothing has changed then.
        """
        if num_turns == len(self.turns):
            return
        if not self.save():
            raise StoreError("nothing can be saved now, so nothing can be taken back")
        head = self.turns[num_turns - 1].id if num_turns else None
        self.session = self.conversations.move_head(self.session.id, head)
        self._left += self.turns[num_turns:]
        self.turns = self.turns[:num_turns]

    def switch(self, turn_id: str) -> None:
        """Go on from behind another turn of the session's tree; what is left stays as a branch.

        Raises StoreError as `rewind` does, and where the session has no such turn.
        """
        if not self.save():
            raise StoreError("nothing can be saved now, so no other branch can be taken")
        if turn_id not in {turn.id for turn in self.conversations.tree(self.session.id)}:
            raise StoreError(f"session {self.session.id} has no turn {turn_id}")
        left, head = self.turns, self.session.head
        self.session = self.conversations.move_head(self.session.id, turn_id)
        try:
            self._take(self.conversations.chain(self.session.id))
        except ChatkvError:
            self.session = self.conversations.move_head(self.session.id, head)
            raise
        self._left += left

    def begin_again(self) -> Turn:
        """The last turn as a new one beside it, with what was answered so far."""
        last = self.turns[-1]
        self.rewind(len(self.turns) - 1)
        turn = self.begin(
            user_text=last.user_text,
            prompt_ids=last.prompt_ids,
            system_text=last.system_text,
            seed=last.seed,
            rng_draws_before=last.rng_draws_before,
            stats=last.stats,
        )
        with suppress(StoreError):  # the whole answer will be written, or held
            self.checkpoint(turn, last.reply_text, last.reply_ids, last.rng_draws_after)
        return replace(turn, rng_draws_after=last.rng_draws_after)

    def held_with(self, model: str, namespace: str, settings: dict[str, Any]) -> None:
        """Note what the session goes on with, for whoever resumes it; `settings` are whole."""
        before = self.session
        if (before.model, before.namespace, before.settings) == (model, namespace, settings):
            return
        self.session = replace(before, model=model, namespace=namespace, settings=settings)
        with suppress(StoreError):  # nobody needs it before the next turn that is saved
            self.conversations.update_session(
                before.id, model=model, namespace=namespace, settings=settings
            )

    def begin(
        self,
        *,
        user_text: str,
        prompt_ids: Sequence[int],
        system_text: str | None,
        seed: int,
        rng_draws_before: int,
        stats: dict[str, Any] | None = None,
    ) -> Turn:
        """Save what the user said, or hold it."""
        stats = stats or {}
        if self.save():
            try:
                self._keep_new()
                self._keep_read()
                return self.conversations.begin_turn(
                    self.session.id,
                    user_text=user_text,
                    prompt_ids=prompt_ids,
                    system_text=system_text,
                    seed=seed,
                    rng_draws_before=rng_draws_before,
                    stats=stats,
                )
            except StoreError as error:
                self._failed(error)
        return self._held(user_text, prompt_ids, system_text, seed, rng_draws_before, stats)

    def checkpoint(self, turn: Turn, text: str, ids: Sequence[int], draws: int) -> None:
        """Save the answer so far; nothing for a turn of which nothing is saved. StoreError."""
        if not any(held.id == turn.id for held in self._unsaved):
            self.conversations.checkpoint_turn(
                turn.id, reply_text=text, reply_ids=ids, rng_draws_after=draws
            )

    def finish(
        self,
        turn: Turn,
        *,
        reply_text: str,
        reply_ids: Sequence[int],
        rng_draws_after: int,
        state: Literal["done", "interrupted"],
        finish_reason: str,
        stats: dict[str, Any],
    ) -> Turn:
        """Commit the whole answer, or hold it; the turn joins `turns` either way."""
        whole = replace(
            turn,
            reply_text=reply_text,
            reply_ids=array("I", reply_ids),
            rng_draws_after=rng_draws_after,
            state=state,
            finish_reason=finish_reason,
            stats=stats,
        )
        self.turns = [*self.turns, whole]
        self._unsaved = [*(held for held in self._unsaved if held.id != turn.id), whole]
        self.save()
        return whole

    def save(self) -> bool:
        """Write what is held; False where that is not possible now."""
        try:
            if not self._is_leased:
                self._hold()
            if self._unsaved or self._is_failing:
                if self._unsaved:
                    self._keep_read()
                self.conversations.keep(self.session, self._unsaved)
        except StoreError as error:
            self._failed(error)
            return False
        self._is_new = self._is_new and not self._unsaved
        self._unsaved = []
        self.refresh()
        if self._is_failing:
            self._is_failing = False
            self.notices.append("everything that was said is saved again")
        return True

    def refresh(self) -> None:
        """Learn the title that the session was given, by its first turn or by its user."""
        with suppress(StoreError):
            title = self.conversations.get_session(self.session.id).title
            self.session = replace(self.session, title=title)

    def take_notices(self) -> list[str]:
        """The lines that were not shown yet; each is given once."""
        lines, self.notices = self.notices, []
        return lines

    def _try_to_hold(self) -> None:
        try:
            self._hold()
            self.conversations.recover()
            self.turns = self.conversations.chain(self.session.id)
            self._left = self.conversations.tree(self.session.id)[len(self.turns) :]
            self.session = self.conversations.get_session(self.session.id)
        except StoreBusy:
            self._open.close()
            raise
        except SessionNotFound:  # made in memory
            self._is_new = True
        except StoreError as error:
            self._failed(error)

    def _keep_new(self) -> None:
        if self._is_new:
            self.conversations.keep(self.session, [])
            self._is_new = False

    def _keep_read(self) -> None:
        """Write the ids of turns that were words alone, and that what is said now goes behind."""
        mine = {turn.id for turn in self.turns}
        read = [turn for turn in self._read if turn.id in mine]
        if read and self._reader is not None:
            self.session = self.conversations.give_ids(self.session.id, read, self._reader.digest)
        self._read = []

    def _hold(self) -> None:
        """Take the lease, which waits for a file that can be written."""
        try:
            lease = self.conversations.lease(self.session.id)
            self._open.enter_context(lease)
        except SessionNotFound:
            self._open.enter_context(self.conversations.lease_of_new(self.session.id))
        self._is_leased = True

    def _held(
        self,
        user_text: str,
        prompt_ids: Sequence[int],
        system_text: str | None,
        seed: int,
        rng_draws_before: int,
        stats: dict[str, Any],
    ) -> Turn:
        """A turn behind the last one, in memory only."""
        from chatkv_store.records import Turn

        last = self.turns[-1] if self.turns else None
        now_s = time.time()
        turn = Turn(
            id=ulid_after(last.id if last else None, now_s),
            session_id=self.session.id,
            parent_id=last.id if last else None,
            index=last.index + 1 if last else 1,
            tokens_before=last.tokens_before + last.num_tokens if last else 0,
            system_text=system_text,
            user_text=user_text,
            reply_text="",
            prompt_ids=array("I", prompt_ids),
            reply_ids=array("I"),
            state="interrupted",
            finish_reason="interrupted",
            seed=seed,
            rng_draws_before=rng_draws_before,
            rng_draws_after=rng_draws_before,
            stats=stats,
            created_at=now_s,
        )
        self._unsaved = [*self._unsaved, turn]
        return turn

    def _failed(self, error: StoreError) -> None:
        if not self._is_failing:
            self._is_failing = True
            self.notices.append(
                "nothing is being saved, the conversation goes on in memory and is written as "
                f"soon as that is possible: {error}"
            )
