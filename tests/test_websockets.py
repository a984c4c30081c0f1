"""Attacks on the built server over WebSockets. They write frames by hand: client libraries refuse to send such frames.

The tests of crates/server/tests/server/limits/websocket.rs check the same bounds by the server's own counts; these
check the memory and the threads of the whole process.
"""

import json
import socket
import struct
import threading

from conftest import ALICE, BOB
from serving import MODEL, TIMEOUT_S, Server, tenant

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
MIB = 1 << 20


def frame(opcode, payload, is_final=True):
    """Returns a frame of a client, with a mask of zeros."""
    head = bytes([opcode | (0x80 if is_final else 0)])
    if len(payload) < 126:
        head += bytes([0x80 | len(payload)])
    elif len(payload) < 1 << 16:
        head += bytes([0x80 | 126]) + struct.pack(">H", len(payload))
    else:
        head += bytes([0x80 | 127]) + struct.pack(">Q", len(payload))
    return head + bytes(4) + payload


class Socket:
    """A WebSocket of which the tests write and read the bytes."""

    def __init__(self, server, key=None):
        self.stream = socket.create_connection((server.host, server.port), TIMEOUT_S)
        head = f"GET /v1/stream HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nConnection: Upgrade\r\n"
        head += "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        head += f"X-Api-Key: {key}\r\n\r\n" if key else "\r\n"
        self.stream.sendall(head.encode())
        self.reader = self.stream.makefile("rb")
        assert b" 101 " in self.reader.readline()
        while self.reader.readline() != b"\r\n":
            pass

    def send(self, data):
        """Sends bytes; returns whether the connection took them."""
        try:
            self.stream.sendall(data)
            return True
        except OSError:
            return False

    def frames(self):
        """Iterates over the frames of the server until the connection ends."""
        try:
            while head := self.reader.read(2):
                length = head[1]
                if length == 126:
                    length = struct.unpack(">H", self.reader.read(2))[0]
                elif length == 127:
                    length = struct.unpack(">Q", self.reader.read(8))[0]
                yield head[0] & 15, self.reader.read(length)
        except OSError:
            return

    def ending(self):
        """Reads up to the end; returns the last error and the close code."""
        error = code = None
        for opcode, payload in self.frames():
            if opcode == CLOSE:
                code = struct.unpack(">H", payload[:2])[0]
            elif opcode == TEXT and b'"error"' in payload:
                error = json.loads(payload)["error"]
        return error, code


def peak_bytes(server):
    """Returns the maximum of the memory that the process has had."""
    with open(f"/proc/{server.process.pid}/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_pings_without_reading_take_no_memory(binaries, model):
    with Server(binaries, model) as server:
        assert server.chat().status == 200
        before = peak_bytes(server)
        attacker = Socket(server)
        block = frame(PING, b"x" * 125) * 8000
        num_sent = 0
        while num_sent < 256 * MIB and attacker.send(block):
            num_sent += len(block)
        frames = list(attacker.frames())
        # A reset may have discarded what the client had not read.
        assert all(opcode == PONG or payload[:2] == struct.pack(">H", 1008) for opcode, payload in frames)
        assert len(frames) < 2000, "the flood was not answered in full"
        grown = peak_bytes(server) - before
        assert grown < 32 * MIB, f"{grown / MIB:.0f} MiB for {num_sent / MIB:.0f} MiB of pings"
        assert server.chat().status == 200


def test_unfinished_messages_leave_memory_to_another_tenant(binaries, model):
    """200 sockets send 2 MiB each of a message that does not end."""
    tenants = [tenant("alice", ALICE), tenant("bob", BOB, metrics=True)]
    with Server(binaries, model, "--max-client-memory", str(64 * MIB), tenants=tenants) as server:
        assert server.chat(key=BOB).status == 200
        before = peak_bytes(server)
        part = frame(TEXT, b" " * (2 * MIB), is_final=False)
        sockets = [Socket(server, ALICE) for _ in range(200)]
        for attacker in sockets:
            attacker.send(part + frame(PING, b""))
        num_held = 0
        for attacker in sockets:
            opcode, payload = next(attacker.frames(), (None, b""))
            if opcode == PONG:
                num_held += 1
            elif opcode == TEXT:
                assert json.loads(payload)["error"]["code"] == "client_memory_share"
                assert attacker.ending()[1] == 1013
        assert 0 < num_held <= 32, "positive control: some are held, within the tenant's share"
        assert server.metric("pellucid_client_memory_bytes", key=BOB) <= 64 * MIB
        assert server.chat(key=BOB).status == 200
        grown = peak_bytes(server) - before
        assert grown < 96 * MIB, f"{grown / MIB:.0f} MiB"


def test_large_control_messages_end_the_connection(binaries, model):
    """Four sockets send control messages of 2 MiB while their replies are paused."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3000}
    large = frame(TEXT, json.dumps({"type": "update", "x": [1] * (MIB // 2)}).encode())
    with Server(binaries, model) as server:
        endings = []

        def attack():
            attacker = Socket(server)
            attacker.send(frame(TEXT, json.dumps({**chat, "ignore_eos": True}).encode()))
            attacker.send(frame(TEXT, b'{"type": "pause"}'))
            for _ in range(32):
                attacker.send(large)
            endings.append(attacker.ending())

        threads = [threading.Thread(target=attack) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        # A reset may have discarded the reason before the client read it.
        assert len(endings) == 4 and all(code in (1009, None) for _, code in endings), endings
        assert server.get("/health").status == 200
        assert server.metric("pellucid_websockets_closed_total") >= 4
