"""Every setting: its name, values, default, variable and flag, and what it is for.

This table is all there is: the file is checked against it, flags are made of it, and
docs/configuration.md shows it (a test holds the two together).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from chatkv.engine.options import SamplingOptions, Speculate
from chatkv.session.request import KVCodec, Role, WantedDtype, WantedWeights
from chatkv.settings.kinds import (
    Choice,
    Duration,
    Flag,
    Kind,
    Names,
    Number,
    Size,
    Switch,
    Table,
    Text,
)

CHATS = ("chat", "resume", "ask")
_SAMPLING = SamplingOptions()


@dataclass(frozen=True)
class Setting:
    """`key` is its name in the file: "temperature", or "serve.port" for `port` in [serve].

    `flag` belongs to `commands`. Where the default is None, `unset` says what that means.
    `is_carried`: whoever needs it reads its variable, which is set from the file. `is_remembered`:
    a conversation goes on with its own, and the setting begins new ones.
    """

    key: str
    kind: Kind
    default: Any
    variable: str
    flag: str
    meaning: str
    commands: tuple[str, ...] = ()
    unset: str = ""
    is_carried: bool = False
    is_remembered: bool = False

    @property
    def parameter(self) -> str:
        """The name under which a command gets its flag."""
        return "models" if self.key == "serve.models" else self.flag[2:].replace("-", "_")


_ALL = (
    Setting(
        "model",
        Text("a folder or .gguf file with its whole path, or a hub id"),
        None,
        "CHATKV_MODEL",
        "--model",
        "A checkpoint's folder, a .gguf file or a hub id.",
        (*CHATS, "calibrate", "codec measure"),
        unset="SmolLM2-135M, which comes with the program",
        is_remembered=True,
    ),
    Setting(
        "dtype",
        Choice(get_args(WantedDtype)),
        "auto",
        "CHATKV_DTYPE",
        "--dtype",
        "Compute in this dtype; auto is what this machine runs faster.",
        (*CHATS, "calibrate", "codec measure"),
        is_remembered=True,
    ),
    Setting(
        "weights",
        Choice(get_args(WantedWeights)),
        "auto",
        "CHATKV_WEIGHTS",
        "--weights",
        "Store weights so: int8, fp8 and int4 are smaller and change them, fp16 hardly; own keeps "
        "the codes of a file that has some; full is in the dtype.",
        CHATS,
        is_remembered=True,
    ),
    Setting(
        "device",
        Choice(("auto", "cpu", "cuda")),
        "auto",
        "CHATKV_DEVICE",
        "--device",
        "Where to compute, unless an engine runs already; auto is a GPU where there is one.",
        (*CHATS, "serve", "calibrate"),
        is_carried=True,
    ),
    Setting(
        "kv-codec",
        Choice(get_args(KVCodec)),
        "lossless",
        "CHATKV_KV_CODEC",
        "--kv-codec",
        "How a session's KV is stored; int8, fp8 and int4 are smaller and change it.",
        CHATS,
        is_remembered=True,
    ),
    Setting(
        "system",
        Text(),
        None,
        "CHATKV_SYSTEM",
        "--system",
        "System prompt of a new session.",
        ("chat", "ask"),
        unset="none",
        is_remembered=True,
    ),
    Setting(
        "max-tokens",
        Number(1, is_whole=True),
        1024,
        "CHATKV_MAX_TOKENS",
        "--max-tokens",
        "Longest answer.",
        CHATS,
    ),
    Setting(
        "temperature",
        Number(0, 100),
        _SAMPLING.temperature,
        "CHATKV_TEMPERATURE",
        "--temperature",
        "0 always takes the likeliest token.",
        CHATS,
    ),
    Setting(
        "top-p",
        Number(0, 1, is_above=True),
        _SAMPLING.top_p,
        "CHATKV_TOP_P",
        "--top-p",
        "Sample from the likeliest tokens of this mass.",
        CHATS,
    ),
    Setting(
        "top-k",
        Number(0, is_whole=True),
        _SAMPLING.top_k,
        "CHATKV_TOP_K",
        "--top-k",
        "Sample from this many tokens, 0 for all.",
        CHATS,
    ),
    Setting(
        "min-p",
        Number(0, 1),
        _SAMPLING.min_p,
        "CHATKV_MIN_P",
        "--min-p",
        "Drop tokens below this share of the likeliest.",
        CHATS,
    ),
    Setting(
        "restore",
        Choice(("auto", "reload", "re-prefill", "both", "remote")),
        "auto",
        "CHATKV_RESTORE",
        "--restore",
        "How history gets back into memory.",
        CHATS,
    ),
    Setting(
        "overflow",
        Choice(("refuse", "shift", "recompute")),
        "refuse",
        "CHATKV_OVERFLOW",
        "--overflow",
        "When the context is full: refuse, or let oldest turns leave and keep the rest roughly "
        "(shift) or compute it again.",
        CHATS,
    ),
    Setting(
        "speculate",
        Choice(get_args(Speculate)),
        "auto",
        "CHATKV_SPECULATE",
        "--speculate",
        "Where guesses at the next tokens come from, which make answers faster and not other ones: "
        "from what was said before (ngram), modules of the model's own (mtp), both where these are "
        "right often enough (auto), a smaller model, or nowhere (off).",
        CHATS,
    ),
    Setting(
        "draft-model",
        Text("a folder or .gguf file with its whole path, or a hub id"),
        None,
        "CHATKV_DRAFT_MODEL",
        "",
        "A smaller model with the same tokens, for --speculate model.",
        unset="none",
        is_carried=True,
    ),
    Setting(
        "mtp",
        Text("a file with its whole path"),
        None,
        "CHATKV_MTP",
        "",
        "Modules or heads that draft for the model, as scripts/train_mtp.py writes them.",
        unset="those of the checkpoint, or that come with the built-in model",
        is_carried=True,
    ),
    Setting(
        "exact",
        Flag(),
        False,
        "CHATKV_EXACT",
        "--exact",
        "Never recompute history, which may round differently.",
        CHATS,
    ),
    Setting(
        "plain",
        Flag(),
        False,
        "CHATKV_PLAIN",
        "--plain",
        "Line by line: append-only, for any terminal or screen reader.",
        ("chat", "resume"),
    ),
    Setting(
        "screen-reader",
        Flag(),
        False,
        "CHATKV_A11Y",
        "",
        "The screen is read aloud: line by line, saying who speaks.",
        is_carried=True,
    ),
    Setting(
        "tui.theme",
        Text("the name of a theme"),
        None,
        "CHATKV_THEME",
        "",
        "Colours of the full-screen chat; /theme shows them.",
        unset="Textual's own",
    ),
    Setting(
        "keys",
        Table("a table of the names of keys and the keys that they shall be"),
        {},
        "",
        "",
        "Keys of the full-screen chat, by the names below.",
        unset="those that F1 shows",
    ),
    Setting(
        "cache.max-size",
        Size(),
        None,
        "CHATKV_KV_MAX_BYTES",
        "",
        "The most that stored KV may take of the disk.",
        unset="20 GiB or a tenth of the disk",
        is_carried=True,
    ),
    Setting(
        "cache.min-free",
        Size(),
        None,
        "CHATKV_KV_MIN_FREE_BYTES",
        "",
        "What stored KV always leaves free on the disk.",
        unset="1 GiB or a twentieth of the disk",
        is_carried=True,
    ),
    Setting(
        "cache.key-file",
        Text("a file with its whole path"),
        None,
        "CHATKV_KEY_FILE",
        "",
        "The file with the passphrase of an encrypted cache.",
        unset="the system's keyring",
        is_carried=True,
    ),
    Setting(
        "engine.shared",
        Switch(),
        True,
        "CHATKV_ENGINE",
        "",
        "Whether chats compute in one process, or each in its own.",
        is_carried=True,
    ),
    Setting(
        "engine.idle",
        Duration(),
        900.0,
        "CHATKV_IDLE_S",
        "",
        "After how long without a request that process ends.",
        is_carried=True,
    ),
    Setting(
        "serve.host",
        Text("an address of this machine"),
        "127.0.0.1",
        "CHATKV_HOST",
        "--host",
        "The address to listen on.",
        ("serve",),
    ),
    Setting(
        "serve.port",
        Number(0, 65535, is_whole=True),
        11535,
        "CHATKV_PORT",
        "--port",
        "The port to listen on, 0 for any.",
        ("serve",),
    ),
    Setting(
        "serve.models",
        Names("a list of models"),
        (),
        "CHATKV_SERVE_MODELS",
        "--model",
        "Offer this model; may be repeated.",
        ("serve",),
        unset="the one of `model`",
    ),
    Setting(
        "serve.role",
        Choice(get_args(Role)),
        "both",
        "CHATKV_ROLE",
        "--role",
        "Do both; or only prefill, for others; or decode, and have long prompts computed by a "
        "prefill worker.",
        ("serve",),
    ),
    Setting(
        "serve.prefill-url",
        Text("an address, http://HOST:PORT or https://HOST:PORT"),
        None,
        "CHATKV_PREFILL_URL",
        "--prefill-url",
        "Where the prefill worker of --role decode is.",
        ("serve",),
        unset="none",
    ),
    Setting(
        "serve.tls-cert",
        Text("a file with its whole path"),
        None,
        "CHATKV_TLS_CERT",
        "--tls-cert",
        "Serve over TLS: the certificate, in PEM form.",
        ("serve",),
        unset="without TLS",
    ),
    Setting(
        "serve.tls-key",
        Text("a file with its whole path"),
        None,
        "CHATKV_TLS_KEY",
        "--tls-key",
        "The key of --tls-cert.",
        ("serve",),
        unset="none",
    ),
    Setting(
        "serve.allowed-hosts",
        Names("a list of names"),
        (),
        "CHATKV_ALLOWED_HOSTS",
        "--allowed-hosts",
        "Names of this machine, by comma.",
        ("serve",),
        unset="none but the loopback's",
    ),
    Setting(
        "serve.allowed-origins",
        Names("a list of URLs"),
        (),
        "CHATKV_ALLOWED_ORIGINS",
        "--allowed-origins",
        "Pages that may ask, by comma.",
        ("serve",),
        unset="none",
    ),
)

SETTINGS = {setting.key: setting for setting in _ALL}
