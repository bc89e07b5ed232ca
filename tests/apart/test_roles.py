"""Roles as a user has them: two servers, their metrics, what turns tell, and wrong options."""

from __future__ import annotations

import datetime
import ipaddress
import json
import multiprocessing
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chatkv.cli.why import explain
from chatkv.server import prefill_notes
from chatkv.server.listen import Access, Tls
from chatkv.words import size
from decoders import LONG
from prefillers import Prefiller, folders_in, prefiller
from program import command, environment, run
from served import ask, chat, served, user


@pytest.fixture
def url(
    home: Path, model: str, worker: Prefiller, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A decode worker's address, whose prefill worker is `worker`."""
    monkeypatch.delenv("CHATKV_ENGINE")
    with served(model, prefill_url=worker.url) as url:
        yield url


def metric(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.slow
def test_two_servers_answer_as_one_and_tell_of_it(
    url: str, worker: Prefiller, alone: list[str]
) -> None:
    answer = chat(url, [user(LONG)])
    assert answer.status == 200
    text = answer.json["choices"][0]["message"]["content"]
    assert text == alone[0]
    timings = answer.json["timings"]
    assert timings["plan"] in ("remote", "none")  # two processes on the same cores: either may pay
    session = answer.headers["x-chatkv-session"]
    told = json.loads(run("why", session, "--format", "json").out)
    assert told["plan"]["alternatives_ms"].keys() == {"none", "remote"}
    seen = ask(url, "/metrics").body.decode()
    plan = timings["plan"]
    assert metric(seen, f'chatkv_plans_total{{plan="{plan}"}}') == 1
    assert metric(seen, f'chatkv_plan_seconds_total{{plan="{plan}",which="taken"}}') > 0
    theirs = ask(worker.url, "/metrics").body.decode()
    assert metric(theirs, "chatkv_models_loaded") == 1


def test_a_prefill_worker_serves_nothing_else(worker: Prefiller) -> None:
    assert ask(worker.url, "/health").status == 200
    assert ask(worker.url, "/v1/models").status == 404
    assert ask(worker.url, "/prefill/sample?bytes=1000").body == bytes(1000)
    assert ask(worker.url, "/prefill/sample?bytes=x").status == 400
    for body in (b"", b"ckvq", b"x" * 100):
        refused = ask(worker.url, "/prefill/kv", body, method="POST")
        assert refused.status == 400 and "error" in refused.json
    state = ask(worker.url, "/prefill").json
    assert state["role"] == "prefill" and len(state["models"]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--role", "decode"], "--prefill-url"),
        (["--prefill-url", "http://127.0.0.1:1"], "--role decode"),
        (["--role", "decode", "--prefill-url", "ftp://there"], "http://HOST:PORT"),
        (["--role", "decode", "--prefill-url", "http://there:port"], "http://HOST:PORT"),
        (["--role", "decode", "--prefill-url", "http://[::1"], "http://HOST:PORT"),
        (["--tls-cert", "cert.pem"], "belong together"),
        (["--tls-cert", "no.pem", "--tls-key", "no.pem"], "no.pem"),
        (["--role", "prefill", "--host", "0.0.0.0"], "CHATKV_TOKEN"),
    ],
)
def test_wrong_options_are_one_clear_line(home: Path, arguments: list[str], says: str) -> None:
    done = run("serve", "--port", "0", *arguments)
    assert done.code != 0 and done.out == ""
    assert done.err.strip().count("\n") == 0 and says in done.err
    assert "Traceback" not in done.err


REMOTE = {
    "worker": "there:1",
    "tokens": 900,
    "bytes": 9_000_000,
    "stored_tokens": 0,
    "ms": 310.0,
    "queue_ms": 20.0,
    "prefill_ms": 250.0,
    "bytes_per_s": 100_000_000,
    "predicted": {"ms": 300.0, "queue_ms": 0.0, "prefill_ms": 240.0, "transfer_ms": 90.0},
    "failure": None,
}


def test_why_tells_what_was_expected_of_the_worker_and_what_it_did() -> None:
    stats = {
        "tokens": {"prompt": 901, "reused": 0, "loaded": 0, "computed": 1, "remote": 900},
        "plan": {
            "chosen": "remote",
            "predicted_ms": 301.0,
            "actual_ms": 312.0,
            "alternatives_ms": {"none": 1000.0, "remote": 301.0},
        },
        "timing": {"ttft_ms": 0, "decode_tokens_per_s": None},
        "remote": REMOTE,
    }
    lines = explain(stats, num_new=901)
    assert "900 came from the prefill worker and 1 were computed" in lines[0]
    assert lines[1] == (
        "It was decided to have it computed by the prefill worker: 301 ms expected, 312 ms taken; "
        "to compute what is new here would have taken about 1,000 ms."
    )
    assert lines[2] == (
        "The prefill worker at there:1 brought 900 tokens, 8.58 MiB, in 310 ms; 300 ms were "
        "expected: 20 ms to wait (0 ms expected), 250 ms to compute (240 ms expected) and 90 ms "
        f"expected on the way, where bytes came at {size(100_000_000)} a second."
    )


@contextmanager
def started(model: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A prefill worker as a user starts one, and where it serves."""
    process = subprocess.Popen(
        command("serve", "--role", "prefill", "--port", "0", "-m", model),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "serving at http://127.0.0.1:" in line
        yield process, line.split("serving at ")[1].split(",")[0].split(" ")[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_program_itself_serves_prefill(home: Path, model: str) -> None:
    """Started as a user does, and ended by Ctrl-C, or by `stop --all`; `stop` names it."""
    with started(model) as (process, url), started(model) as (other, other_url):
        assert ask(url, "/health").status == 200
        process.send_signal(2)
        assert process.wait(60) == 0
        said = json.loads(run("status", "--format", "json").out)
        (named,) = said["prefill_workers"]
        assert named["pid"] == other.pid and other_url in named["urls"]
        stopped = run("stop")
        assert stopped.code == 0 and f"{other_url}" in stopped.err and "--all" in stopped.err
        assert other.poll() is None
        assert run("stop", "--all").code == 0
        assert other.wait(60) == 0
    assert json.loads(run("status", "--format", "json").out)["prefill_workers"] == []


def test_a_worker_that_was_killed_is_not_named(home: Path) -> None:
    """Its note stays, and nobody holds it."""
    place = folders_in(home)

    def be_one(ready: Any) -> None:
        with prefill_notes.noted(place, ["http://127.0.0.1:1"]):
            ready.send(True)
            signal.pause()

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=be_one, args=(theirs,))
    process.start()
    assert ours.poll(60) and ours.recv()
    assert [one.pid for one in prefill_notes.running(place)] == [process.pid]
    process.kill()
    process.join(60)
    assert list(place.prefill_notes.iterdir())
    assert prefill_notes.running(place) == []
    assert list(place.prefill_notes.iterdir()) == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Of 127.0.0.1, signed by itself."""
    pytest.importorskip("cryptography", reason="it makes the certificate")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "chatkv test")])
    day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("certificate")
    cert, private = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return Tls(str(cert), str(private))


@pytest.mark.slow
def test_frames_come_over_tls(
    tmp_path: Path,
    model: str,
    decoder: Any,
    alone: list[str],
    certificate: Tls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a certificate that is trusted; one that is not is no worker."""
    about = {"access": Access(tokens=("right",)), "token": "right", "min_value_bytes": 1}
    monkeypatch.setenv("SSL_CERT_FILE", certificate.cert_file)
    with prefiller(tmp_path / "prefill", model, tls=certificate, **about) as worker:
        assert worker.url.startswith("https://")
        first = decoder(worker.at("right")).say()
        assert first.text == alone[0] and first.remote["failure"] is None
        assert first.tokens.remote == first.tokens.prompt - 1
        monkeypatch.delenv("SSL_CERT_FILE")
        other = decoder(worker.at("right"), folders_in(tmp_path / "another")).say()
        assert other.text == alone[0] and other.tokens.remote == 0
        assert any("cannot be trusted" in line for line in other.notices)
