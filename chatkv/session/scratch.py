"""Answers that leave nothing behind: a title for a conversation, tags, a request of no session.

Such requests are short, many, and share no beginning with anything: their KV is not stored, and
theirs is the first to leave memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatkv.engine.sampling import Sampler
from chatkv.engine.scheduler import Cancelled
from chatkv.engine.stops import StopStrings
from chatkv.errors import ContextFull
from chatkv.session.generation import Generation, ModelParts
from chatkv.session.record import TurnRecord
from chatkv.session.reply import Reply
from chatkv.session.turn import Listener, TurnOptions, TurnResult


def answer_once(
    model: ModelParts,
    messages: Sequence[dict[str, Any]],
    options: TurnOptions,
    listener: Listener | None = None,
) -> TurnResult:
    """The model's answer to chat messages (role, content), the last of which is the user's.

    What is in memory of equal prompts is made use of. `options.seed` None is 0: nothing is kept
    that could go on. The model's restorer must be one without a disk.
    """
    rendered = model.template.render(list(messages), add_generation_prompt=True)
    ids = model.tokenizer.encode_rendered(rendered.text, rendered.content_spans)
    return go_on(model, ids, options, listener)


def go_on(
    model: ModelParts, ids: Sequence[int], options: TurnOptions, listener: Listener | None = None
) -> TurnResult:
    """What the model writes behind token ids; see `answer_once`."""
    listener = listener or Listener()
    limit = model.engine.max_tokens
    if len(ids) >= limit:
        raise ContextFull(f"this request has {len(ids)} tokens, but the context ends at {limit}")
    sequence, record = model.restorer.scratch_sequence(), TurnRecord(model.load_model_ms)
    reply = Reply(model.tokenizer.stream(), StopStrings(options.stop), listener.on_text)
    sampler = Sampler(options.sampling, options.seed or 0, grammar=model.grammar(options))
    generation = Generation(
        model, sequence, options, listener, sampler, reply, record, options.max_tokens
    )
    with model.engine.memory.use(sequence, options.is_background, listener.waits):
        try:
            generation.run(model.restorer.plan(sequence, ids, history=0))
        except Cancelled:
            pass
        finally:
            reply.finish()
    return TurnResult(
        session="",
        turn=0,
        text=reply.text,
        finish_reason=record.finish,
        tokens=record.tokens(len(reply.ids)),
        plan=record.plan,
        plan_actual_ms=record.plan_actual_ms,
        timing=record.timing(),
        model=model.name,
        notices=record.restored.all_notices if record.restored is not None else (),
        last_logits=record.last_logits,
        speculation=record.speculation,
    )
