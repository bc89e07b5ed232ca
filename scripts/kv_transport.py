#!/usr/bin/env python3
"""KV from one process to another, each on a core of its own: as a prefill worker sends it, and as a
raw socket carries as many bytes. For bench_disaggregation.py."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
REQUEST = b"all of it"
SAMPLE_IDS = list(range(1024))  # whose KV is carried


def transport(layout: str, sender: int, receiver: int, repeats: int) -> list[list[float]]:
    """Bytes a second of KV from a pool in one process to another process, each on its core, as a
    worker sends what it has: verified and in its place there, and only read. Both are forked from
    this one, which must have computed nothing yet."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    port = context.SimpleQueue()
    pool = context.Process(target=be_pool, args=(port, sender, layout), daemon=True)
    pool.start()
    arguments = (theirs, receiver, f"http://127.0.0.1:{port.get()}", layout, repeats)
    reader = context.Process(target=be_receiver, args=arguments, daemon=True)
    reader.start()
    theirs.close()
    try:
        rates: list[list[float]] = ours.recv()
    finally:
        for process in (reader, pool):
            process.kill()
            process.join()
    return rates


def be_pool(port: Any, core: int, layout_json: str) -> None:
    """Answers every request with all of a pool, as `server.prefill_work` sends it."""
    os.sched_setaffinity(0, {core})
    from threading import Event

    import torch

    from chatkv.apart.wire import End, Frame, Head, Kind, digest_of
    from chatkv.restore.taking import as_bits, of_group
    from chatkv.server.direct import SocketSink
    from chatkv.server.prefill_work import stretches
    from chatkv_store.keys import chain_keys
    from chatkv_store.layout import KVLayout

    layout = KVLayout.from_json(layout_json)
    shape = (layout.num_layers, 2, layout.num_kv_heads, len(SAMPLE_IDS), layout.head_dim)
    kv = as_bits(torch.randn(shape, dtype=getattr(torch, layout.dtype)))
    keys = chain_keys(bytes(32), SAMPLE_IDS, 64)
    ends = [msgspec.json.encode(one) for one in (Head(0), End(0, 0, 0))]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.put(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            with connection:
                asked = b""
                while not asked.endswith(REQUEST):
                    asked += connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                sink = SocketSink(connection, Event())
                sink.send([Frame(Kind.HEAD, 0).with_payload(ends[0]).pack(), ends[0]])
                number = 1
                for block, key in enumerate(keys):
                    bits = kv[:, :, :, block * 64 : block * 64 + 64]
                    for group in range(layout.num_values):
                        parts = stretches(of_group(bits, layout, group))
                        size = sum(part.nbytes for part in parts)
                        about = (group, block * 64, 64, size, key, digest_of(parts))
                        sink.send([Frame(Kind.VALUE, number, *about).pack(), *parts])
                        number += 1
                sink.send([Frame(Kind.END, number).with_payload(ends[1]).pack(), ends[1]])
                connection.sendall(b"0\r\n\r\n")


def be_receiver(told: Any, core: int, url: str, layout_json: str, repeats: int) -> None:
    os.sched_setaffinity(0, {core})
    import numpy as np

    from chatkv.apart.over_http import HttpTransport
    from chatkv.apart.receive import Receiver
    from chatkv_store.layout import KVLayout

    layout = KVLayout.from_json(layout_json)
    shape = (layout.num_layers, 2, layout.num_kv_heads, len(SAMPLE_IDS), layout.head_dim)
    kv = np.zeros(shape, layout.bits_dtype)

    payload = memoryview(bytearray(layout.bytes_per_token * layout.block_tokens))

    def put(group: int, start: int, bits: Any) -> None:
        layers = layout.value_layers(group)
        kv[layers.start : layers.stop, :, :, start : start + bits.shape[3]] = bits

    def fetched(in_place: bool) -> float:
        with closing(HttpTransport(url).ask(REQUEST, 60)) as stream:
            began = time.perf_counter()
            if in_place:
                receiver = Receiver(layout, bytes(32), SAMPLE_IDS, 0, put)
                receiver.run(stream.read_into)
                num_bytes, waited_s = receiver.received.num_bytes, receiver.received.waited_s
            else:
                num_bytes, waited_s = read_only(stream.read_into, payload)
            return float(num_bytes / (time.perf_counter() - began - waited_s))

    fetched(True)  # memory that is written for the first time takes longer
    found = [(fetched(True), fetched(False)) for _ in range(repeats)]
    told.send([list(rates) for rates in zip(*found, strict=True)])


def read_only(read_into: Callable[[memoryview], None], payload: memoryview) -> tuple[int, float]:
    """Frames that are read and thrown away: how many bytes of KV, and when they began to come."""
    from chatkv.apart.wire import HEAD_BYTES, Kind, unpack_frame

    head = memoryview(bytearray(HEAD_BYTES))
    began, number, num_bytes, waited_s = time.perf_counter(), 0, 0, 0.0
    while True:
        read_into(head)
        frame = unpack_frame(head, number)
        read_into(payload[: frame.num_bytes])
        if frame.kind == Kind.END:
            return num_bytes, waited_s
        if frame.kind == Kind.VALUE:
            waited_s = waited_s or time.perf_counter() - began
            num_bytes += frame.num_bytes
        number += 1


def raw_socket(sender: int, receiver: int, num_bytes: int, repeats: int) -> list[float]:
    """Bytes a second from one process to another, each on its core, and nothing done with them."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = str(listener.getsockname()[1])
    arguments = [str(num_bytes), str(repeats)]
    child = subprocess.Popen(
        ["taskset", "-c", str(sender), sys.executable, __file__, port, *arguments]
    )
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {receiver})
    rates, buffer = [], memoryview(bytearray(256 << 10))
    try:
        with listener, listener.accept()[0] as connection:
            for _ in range(repeats):
                left, began = num_bytes, time.perf_counter()
                while left:
                    left -= connection.recv_into(buffer[: min(left, len(buffer))])
                rates.append(num_bytes / (time.perf_counter() - began))
                connection.sendall(b"k")
    finally:
        os.sched_setaffinity(0, before)
        child.wait(30)
    return rates


def be_sender(port: str, num_bytes: str, repeats: str) -> None:
    data = memoryview(bytearray(os.urandom(1 << 20)) * (int(num_bytes) >> 20))
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        for _ in range(int(repeats)):
            for at in range(0, len(data), 256 << 10):
                connection.sendall(data[at : at + (256 << 10)])
            connection.recv(1)


if __name__ == "__main__":
    be_sender(*sys.argv[1:])
