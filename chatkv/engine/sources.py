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
from chatkv.model.mtp import Foresight

# `auto` drafts by modules or heads whose first guess is right so often, as was measured when they
# were trained: less hardly pays for looking at what they guess before each step.
AUTO_FROM = 0.45


def check_source(wanted: Speculate, engine: Engine) -> None:
    """Raises UsageError for drafts that this engine cannot have, before a turn begins."""
    if wanted == "model" and engine.drafts is None:
        raise UsageError("--speculate model: name a smaller model in CHATKV_DRAFT_MODEL first")
    if wanted == "mtp" and engine.foresight is None:
        raise UsageError(
            "--speculate mtp: this model has no modules to draft with here; train some with "
            "scripts/train_mtp.py and name their file in CHATKV_MTP"
        )


def _who_predicts(foresight: Foresight) -> tuple[Speculate, ...]:
    """What has modules or heads draft: auto too, where they may well pay."""
    rate = foresight.acceptance
    return ("mtp", "auto") if rate is None or rate >= AUTO_FROM else ("mtp",)


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
    elif engine.foresight is not None and wanted in _who_predicts(engine.foresight):
        mtp = MtpDrafter(engine.predictor, sequence, engine.scheduler.compute)
        drafter = mtp if wanted == "mtp" else BothDrafter(NgramDrafter(), mtp)
    else:
        drafter = NgramDrafter()
    return Speculation(drafter, engine.draft_costs)
