"""One conversation, open: its token log, its KV in the pool, and the turn from top to bottom.

The token log is the truth. A turn appends ids to it, in front of the reply those that the chat
template adds for the user's message, then those that were sampled; history is never tokenised
again. Text and ids are committed to SQLite; KV is a cache beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chatkv.engine.sampling import Sampler
from chatkv.engine.scheduler import Cancelled
from chatkv.engine.sources import check_source
from chatkv.engine.stops import StopStrings
from chatkv.errors import ModelError, UsageError
from chatkv.model.template import ChatTemplate, Rendered
from chatkv.session.fitting import fit, too_long
from chatkv.session.generation import Generation, ModelParts
from chatkv.session.journal import Journal
from chatkv.session.record import TurnRecord
from chatkv.session.reply import Checkpointer, Reply
from chatkv.session.turn import Listener, TurnOptions, TurnResult
from chatkv.session.window import context_of, last_window

if TYPE_CHECKING:
    from chatkv.restore.restored import Planned
    from chatkv.session.messages import Message
    from chatkv_store.conversations import Conversations, Session, Turn
    from chatkv_store.records import Window


class Conversation:
    """An open session; holds its lease until it is closed.

    Raises StoreBusy where another process has it open.
    """

    def __init__(self, model: ModelParts, conversations: Conversations, session: Session) -> None:
        self.model = model
        self.journal = Journal(conversations, session)
        self.sequence = model.restorer.sequence(session.id)
        self._said_kv_is_lost = False

    def close(self) -> None:
        """Give the lease back. KV stays in memory until others need the room."""
        self.journal.close()

    @property
    def session(self) -> Session:
        return self.journal.session

    @property
    def turns(self) -> list[Turn]:
        """What was said so far, the first turn first."""
        return self.journal.turns

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def window(self) -> Window | None:
        """What of the turns the model still has before it, None: all of them."""
        return last_window(self.turns)

    @property
    def log(self) -> list[int]:
        """Every token of the conversation so far that the model has before it."""
        return context_of(self.turns, self.window)

    def send(
        self,
        text: str,
        options: TurnOptions | None = None,
        listener: Listener | None = None,
        system: str | None = None,
        said: Sequence[Message] = (),
    ) -> TurnResult:
        """Say `text` and hear the answer: one turn, from words to words.

        `said`: the messages that stand for `text`, where they are not one of the user (results of
        tools). Cancelled turns return with finish_reason "interrupted" and what was said until
        then.
        """
        options, listener = options or TurnOptions(), listener or Listener()
        check_source(options.speculate, self.model.engine)
        with self._in_use(options, listener):
            grammar = self.model.grammar(options)
            text, system = _encodable(text), None if system is None else _encodable(system)
            record = TurnRecord(self.model.load_model_ms)
            prompt_ids = self.prompt_ids(text, system, said)
            fitted = fit(self, prompt_ids, options)
            planned = self.model.restorer.plan(
                self.sequence,
                [*fitted.history, *prompt_ids],
                fitted.num_computed,
                options.restore,
                options.exact,
            )
            turn = self._begin(text, prompt_ids, system, options, fitted.window, said)
            self.journal.notices += fitted.notices
            reply = self._reply(options, listener)
            sampler = Sampler(options.sampling, turn.seed, turn.rng_draws_after, grammar)
            return self._answer(turn, planned, reply, record, options, listener, sampler)

    def resume_reply(
        self, options: TurnOptions | None = None, listener: Listener | None = None
    ) -> TurnResult:
        """Go on with the last answer from its last token, where it was stopped or cut; or answer a
        question that never was. The whole answer is the result's text; the listener hears what is
        new. The shorter answer stays behind as a branch."""
        options, listener = options or TurnOptions(), listener or Listener()
        check_source(options.speculate, self.model.engine)
        if not self.turns or self.turns[-1].finish_reason == "stop":
            raise UsageError("there is no answer to go on with: the last one is complete")
        with self._in_use(options, listener):
            record = TurnRecord(self.model.load_model_ms)
            last, log, computed = self.turns[-1], self.log, self.num_computed
            grammar = self.model.grammar(options, last.reply_ids)
            if len(log) >= self.model.engine.max_tokens:
                raise too_long(len(log), 0, self.model.engine.max_tokens)
            planned = self.model.restorer.plan(
                self.sequence, log, computed, options.restore, options.exact
            )
            turn = self.journal.begin_again()
            reply = self._reply(options, listener)
            reply.go_on_from(last.reply_ids, turn.rng_draws_after)
            sampler = Sampler(options.sampling, turn.seed, turn.rng_draws_after, grammar)
            return self._answer(turn, planned, reply, record, options, listener, sampler)

    def rewind(self, num_turns: int) -> None:
        """Go on from behind the first num_turns turns. The others stay in the file as a branch,
        until the session is deleted, and their KV in the cache."""
        if not 0 <= num_turns <= len(self.turns):
            raise UsageError(
                f"turn {num_turns} does not exist: this session has {len(self.turns)} turns"
            )
        self.journal.rewind(num_turns)

    def switch(self, turn_id: str) -> None:
        """Go on from behind another turn of this session's tree, such as a branch's last one."""
        self.journal.switch(turn_id)

    def use_template(self, template: ChatTemplate) -> None:
        """Render what comes with `template`: the model's own, told of other tools."""
        self.model = replace(self.model, template=template)

    def _answer(
        self,
        turn: Turn,
        planned: Planned,
        reply: Reply,
        record: TurnRecord,
        options: TurnOptions,
        listener: Listener,
        sampler: Sampler,
    ) -> TurnResult:
        """From the plan to the committed answer."""
        max_ids = len(reply.ids) + options.max_tokens
        generation = Generation(
            self.model, self.sequence, options, listener, sampler, reply, record, max_ids
        )
        checkpoints = Checkpointer(lambda: self._checkpoint(turn, reply))
        try:
            with checkpoints, suppress(Cancelled):
                generation.run(planned)
        finally:
            reply.finish()
            turn = self._finish(turn, reply, sampler, record)
        return self._result(turn, record, self._notices(record, checkpoints))

    def _in_use(self, options: TurnOptions, listener: Listener) -> AbstractContextManager[None]:
        return self.model.engine.memory.use(self.sequence, options.is_background, listener.waits)

    def _reply(self, options: TurnOptions, listener: Listener) -> Reply:
        stops = StopStrings(options.stop)
        return Reply(self.model.tokenizer.stream(), stops, listener.on_text)

    # --- the steps of a turn ----------------------------------------------------------------

    def prompt_ids(
        self, text: str, system: str | None = None, said: Sequence[Message] = ()
    ) -> list[int]:
        """The ids that this message adds to the log, generation prompt included."""
        if system is not None and self.turns:
            raise UsageError("a system prompt can only be given to a new session")
        messages = [*self.messages(system), *(said or _said_by_user(text))]
        template, tokenizer = self.model.template, self.model.tokenizer
        if self.turns:
            rendered = _without_start(template.continuation(messages), self._end_text())
            return tokenizer.encode_continuation(
                rendered.text, rendered.content_spans, self.log[-1]
            )
        rendered = template.render(messages, add_generation_prompt=True)
        return tokenizer.encode_rendered(rendered.text, rendered.content_spans)

    def _begin(
        self,
        text: str,
        prompt_ids: list[int],
        system: str | None,
        options: TurnOptions,
        window: Window | None,
        said: Sequence[Message] = (),
    ) -> Turn:
        """Save what the user said before anything is computed."""
        seed = self.session.settings["seed"] if options.seed is None else options.seed
        return self.journal.begin(
            user_text=text,
            prompt_ids=prompt_ids,
            system_text=system,
            seed=seed,
            rng_draws_before=self.journal.draws_of(seed),
            stats=({"window": window.to_json()} if window else {})
            | ({"said": list(said)} if said else {}),
        )

    def _checkpoint(self, turn: Turn, reply: Reply) -> None:
        if reply.ids:
            # Text first: ids may run ahead of it, never the other way round.
            text, ids = reply.text, list(reply.ids)
            self.journal.checkpoint(turn, text, ids, reply.draws_after(len(ids)))

    def _finish(self, turn: Turn, reply: Reply, sampler: Sampler, record: TurnRecord) -> Turn:
        """Commit the turn, then hand its KV to the writer."""
        if self.turns and record.restored is not None and record.restored.history:
            with suppress(ModelError):  # a template is a program; the turn is to be saved even so
                record.template = self.difference_from_template()
        turn = self.journal.finish(
            turn,
            reply_text=reply.text,
            reply_ids=reply.ids,
            rng_draws_after=sampler.draws,
            state="interrupted" if record.finish == "interrupted" else "done",
            finish_reason=record.finish,
            stats=record.to_json(len(reply.ids), self.model.tokenizer.decode) | _lasting(turn),
        )
        log = self.log
        self.sequence.become(log, self.sequence.common_prefix(log))
        self.model.restorer.save(self.sequence, tail=True)
        if record.restored is not None and not record.was_preempted:
            self.model.restorer.learn(record.restored, record.num_computed, record.prefill_s)
        return turn

    @property
    def num_computed(self) -> int:
        """Leading tokens of the log whose KV some turn has computed: all up to the last reply,
        less its last token, which was sampled and never fed. (What follows the last reply is the
        question of a turn that ended before it was answered.)"""
        answered = [
            index
            for index, turn in enumerate(self.turns, 1)
            if turn.reply_ids and not turn.stats.get("is_adopted")
        ]
        if not answered:
            return 0
        return len(context_of(self.turns[: answered[-1]], self.window)) - 1

    def adopt(
        self,
        pairs: Sequence[tuple[str | Sequence[Message], str]],
        system: str | None = None,
    ) -> None:
        """Put turns that were held elsewhere behind the log: what was asked (as text, or as the
        messages that stand for it) and answered. Nothing is computed; the next turn does that."""
        for asked, answer in pairs:
            said = () if isinstance(asked, str) else asked
            text = asked if isinstance(asked, str) else text_of(asked)
            prompt_ids = self.prompt_ids(text, system, said)
            turn = self._begin(text, prompt_ids, system, TurnOptions(), self.window, said)
            reply_ids = self.model.tokenizer.encode_continuation(
                answer, ((0, len(answer)),), prompt_ids[-1]
            )
            self.journal.finish(
                turn,
                reply_text=answer,
                reply_ids=reply_ids,
                rng_draws_after=turn.rng_draws_before,
                state="done",
                finish_reason="stop",
                stats={"is_adopted": True, **_lasting(turn)},
            )
            system = None

    # --- text and log -----------------------------------------------------------------------

    def messages(self, system: str | None = None) -> list[dict[str, Any]]:
        """The conversation as chat messages; `system` for one that has not begun."""
        first_system = self.turns[0].system_text if self.turns else system
        messages = [{"role": "system", "content": first_system}] if first_system else []
        for turn in self.turns:
            messages += turn.stats.get("said") or _said_by_user(turn.user_text)
            messages.append({"role": "assistant", "content": turn.reply_text})
        return messages

    def _end_text(self) -> str:
        """The text of the stop token that ended the last reply, "" where none did."""
        reply_ids = self.turns[-1].reply_ids
        if reply_ids and reply_ids[-1] in self.model.tokenizer.stop_ids:
            return self.model.tokenizer.decode(reply_ids[-1:], skip_special=False)
        return ""

    def difference_from_template(self) -> str | None:
        """Where the log's text departs from the template's rendering of the whole conversation,
        as a line for the user; None where they agree."""
        if self.window is not None:  # it would, and is meant to
            return None
        decode = self.model.tokenizer.decode
        messages = self.messages()
        # A stop string may begin inside a token, whose end is then in the log and not in the text.
        replies = (message for message in messages if message["role"] == "assistant")
        for message, turn in zip(replies, self.turns, strict=True):
            message["content"] = decode(turn.reply_ids)
        difference = self.model.template.matches_log(messages, decode(self.log, skip_special=False))
        if difference is None:
            return None
        return f"the chat template would write this conversation differently {difference}"

    def _notices(self, record: TurnRecord, checkpoints: Checkpointer) -> tuple[str, ...]:
        lines = list(record.restored.all_notices) if record.restored is not None else []
        lines += self.journal.take_notices()
        disk = self.model.restorer.disk
        error = disk.writer.stats().error if disk is not None else None
        if error is not None and not self._said_kv_is_lost:
            self._said_kv_is_lost = True
            lines.append(f"KV is not being stored, and is computed again when needed: {error}")
        if checkpoints.error is not None and not self.journal.num_unsaved:
            lines.append(f"the reply could not be saved while it was written: {checkpoints.error}")
        difference = self.difference_from_template()
        if difference is not None:
            lines.append(difference)
        return tuple(lines)

    def _result(self, turn: Turn, record: TurnRecord, notices: tuple[str, ...]) -> TurnResult:
        return TurnResult(
            session=self.session.id,
            turn=turn.index,
            text=turn.reply_text,
            finish_reason=record.finish,
            tokens=record.tokens(len(turn.reply_ids)),
            plan=record.plan,
            plan_actual_ms=record.plan_actual_ms,
            timing=record.timing(),
            model=self.model.name,
            notices=notices,
            last_logits=record.last_logits,
            speculation=record.speculation,
            remote=record.remote,
        )


def text_of(said: Sequence[Message]) -> str:
    """What people are shown of messages, and find them by."""
    return "\n".join(str(message["content"]) for message in said)


def _said_by_user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _lasting(turn: Turn) -> dict[str, Any]:
    """Of a turn's `stats`, what it began with and must not lose."""
    return {name: turn.stats[name] for name in ("window", "said") if name in turn.stats}


def _encodable(text: str) -> str:
    """`text` less lone surrogates, which no tokenizer takes: undecodable bytes of a command line
    arrive as such."""
    return text.encode("utf-8", "replace").decode()


def _without_start(rendered: Rendered, start: str) -> Rendered:
    """`rendered` less `start`, the end-of-turn text that the log holds already."""
    if not start or not rendered.text.startswith(start):
        return rendered
    cut = len(start)
    spans = tuple((first - cut, last - cut) for first, last in rendered.content_spans)
    return Rendered(rendered.text[cut:], spans)
