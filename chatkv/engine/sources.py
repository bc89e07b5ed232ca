"""Which drafts an answer gets."""

from __future__ import annotations

from chatkv.engine.both_drafts import BothDrafter
from chatkv.engine.draft_model import ModelDrafter
from chatkv.engine.drafts import Drafter, NoDrafts
from chatkv.engine.engine import Engine
from chatkv.engine.mtp import MtpDrafter
from chatkv.engine.ngram import NgramDrafter
from chatkv.engine.options import Speculate
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.speculation import Speculation
from chatkv.errors import UsageError


def check_source(wanted: Speculate, engine: Engine) -> None:
    """Raises UsageError for drafts that this engine cannot have, before a turn begins."""
    if wanted == "model" and engine.drafts is None:
        raise UsageError("--speculate model: name a smaller model in CHATKV_DRAFT_MODEL first")
    if wanted == "mtp" and engine.predictor is None:
        raise UsageError(
            "--speculate mtp: this model has no modules to draft with here; train some with "
            "scripts/train_mtp.py and name their file in CHATKV_MTP"
        )


def speculation(
    wanted: Speculate, engine: Engine, sequence: TokenSequence, sampler: Sampler
) -> Speculation:
    """For the answer that `sampler` draws behind `sequence`."""
    check_source(wanted, engine)
    drafter: Drafter
    if wanted == "off":
        drafter = NoDrafts()
    elif wanted == "model" and engine.drafts is not None:
        vocab_size = engine.decoder.config.vocab_size
        drafter = ModelDrafter(engine.drafts, sequence, sampler, vocab_size)
    elif wanted == "ngram" or engine.predictor is None:
        drafter = NgramDrafter()
    else:
        compute, is_asked_for = engine.scheduler.compute, wanted == "mtp"
        mtp = MtpDrafter(engine.predictor, sequence, sampler, compute, not is_asked_for)
        drafter = mtp if is_asked_for else BothDrafter(NgramDrafter(), mtp)
    return Speculation(drafter, engine.draft_costs)
