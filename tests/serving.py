"""The built server under test.

It uses http.client, which lets tests send invalid requests that client libraries would reject.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

MODEL = "tiny"
# Seconds to wait for anything, on a busy machine too.
TIMEOUT_S = 60


@dataclass
class Reply:
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        """The `data` of each server-sent event."""
        lines = self.body.decode().split("\n\n")
        return [line[len("data: "):] for line in lines if line.startswith("data: ")]

    @property
    def chunks(self):
        """The chunks of a complete stream, without [DONE]."""
        assert self.status == 200, self
        assert self.events[-1] == "[DONE]", self.events[-3:]
        return [json.loads(event) for event in self.events[:-1]]


def write_model(binaries, folder, *words):
    """Writes a tiny model; `words` are further arguments of the example `tiny_model`."""
    subprocess.run([binaries / "examples/tiny_model", folder, *words], check=True)
    return folder


def tenant(name, key, **limits):
    return {"name": name, "keys": [key], **limits}


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [socket.getsockname()[1] for socket in sockets]


def until(holds, what):
    """Waits until `holds()` is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Client:
    """Requests to a server at an address."""

    def __init__(self, url, tls=None):
        self.url = url
        self.host, port = url.split("://")[1].rsplit(":", 1)
        self.port = int(port)
        # The SSL context for clients, if the server has a certificate.
        self.tls = tls
        self.local = threading.local()

    def connect(self):
        if self.tls:
            return http.client.HTTPSConnection(self.host, self.port, timeout=TIMEOUT_S, context=self.tls)
        return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)

    def ask(self, method, path, body=None, key=None, **headers):
        """Sends a request on this thread's connection. A body that is not bytes is sent as JSON."""
        connection = getattr(self.local, "connection", None)
        if connection is None:
            connection = self.local.connection = self.connect()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            headers.setdefault("content-type", "application/json")
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        for attempt in (1, 2):
            try:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                break
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                # The server may close an idle connection at any time, so the first attempt may fail.
                connection.close()
                if attempt == 2:
                    raise
        found = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, found, response.read())

    def get(self, path, **options):
        return self.ask("GET", path, **options)

    def post(self, path, body, **options):
        return self.ask("POST", path, body, **options)

    def chat(self, text="hello", key=None, **fields):
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "seed": 1}
        return self.post("/v1/chat/completions", {**body, **fields}, key=key)

    def complete(self, prompt="hello", key=None, **fields):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "seed": 1}
        return self.post("/v1/completions", {**body, **fields}, key=key)

    def tokens(self, key=None, **fields):
        return self.post("/tokenize", fields, key=key).json["tokens"]

    def metric(self, name, key=None):
        """Returns the sum of a metric over its labels."""
        lines = self.get("/metrics", key=key).body.decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"/metrics has no {name}"
        return sum(values)


class Server(Client):
    """A server on a free port, stopped at the end of the `with` block."""

    def __init__(self, binaries, model, *flags, tenants=None, tls=None, name=MODEL):
        self.scratch = tempfile.TemporaryDirectory()
        command = [binaries / "pellucid", "serve", "--model", model, "--port", "0"]
        # Several models have names of their own.
        command += ["--served-model-name", name] if name else []
        command += ["--log-format", "json", *flags]
        if tenants:
            keys = Path(self.scratch.name) / "keys.json"
            keys.write_text(json.dumps({"tenant": tenants}))
            command += ["--keys-file", keys]
        environment = {"PATH": os.environ["PATH"], "PELLUCID_HOME": self.scratch.name}
        self.process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, env=environment)
        self.log = []
        url = None
        for line in self.process.stderr:
            self.log.append(line.decode())
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            if fields.get("message") == "listening":
                url = fields["url"]
                break
        assert url, "".join(self.log)
        super().__init__(url, tls)
        # The pipe must be read, or the server would block.
        self.reader = threading.Thread(target=lambda: self.log.extend(line.decode() for line in self.process.stderr))
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
        self.end()

    def end(self):
        """Waits until the server has ended, and returns its exit status."""
        try:
            status = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.reader.join()
        self.scratch.cleanup()
        return status
