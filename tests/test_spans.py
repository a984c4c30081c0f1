"""Spans of requests, read with the package of OpenTelemetry's protocol by a collector on this machine."""

import http.server
import json
import threading
import time

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from conftest import ALICE
from serving import TIMEOUT_S, Server, tenant

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "strawberry"


class Service(http.server.ThreadingHTTPServer):
    """An HTTP service that keeps the requests it got: path, headers, body."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests = answer, []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((self.path, self.headers, body))
        status, answer = self.server.answer()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def until(found, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not (result := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return result


def spans(collector, trace=None):
    """The spans of a trace by name, from all messages so far."""
    found = {}
    for path, headers, body in list(collector.requests):
        assert (path, headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            assert attributes(resource.resource)["service.name"] == "pellucid"
            for span in resource.scope_spans[0].spans:
                if trace is None or span.trace_id.hex() == trace:
                    found[span.name] = span
    return found


def attributes(message):
    value = lambda any: getattr(any, any.WhichOneof("value"))
    return {pair.key: value(pair.value) for pair in message.attributes}


@pytest.fixture
def collector():
    with Service(lambda: (200, b"")) as collector:
        yield collector


@pytest.fixture
def judge():
    with Service(lambda: (200, b'{"verdict": "pass"}')) as judge:
        yield judge


def test_a_request_is_a_trace_of_its_client(binaries, model, collector, judge):
    flags = ["--otlp-endpoint", collector.url, "--guard-url", judge.url + "/judge"]
    with Server(binaries, model, *flags, tenants=[tenant("alice", ALICE)]) as server:
        given = f"00-{TRACE}-{CALLER}-01"
        body = json.dumps({"model": "tiny", "prompt": f"{SECRET} hello", "max_tokens": 8, "ignore_eos": True}).encode()
        reply = server.post("/v1/completions", body, key=ALICE, traceparent=given)
        assert reply.status == 200, reply
        found = until(lambda: (all := spans(collector, TRACE)) and "POST /v1/completions" in all and all, "no trace")
        assert sorted(found) == ["POST /v1/completions", "decode", "guard", "prefill", "queue"]
        root = found.pop("POST /v1/completions")
        assert root.parent_span_id.hex() == CALLER and root.kind == root.SPAN_KIND_SERVER
        assert all(span.parent_span_id == root.span_id for span in found.values())
        ids = {span.span_id for span in [root, *found.values()]}
        assert len(ids) == 5
        facts = attributes(root)
        usage = reply.json["usage"]
        assert facts["http.response.status_code"] == 200 and facts["pellucid.tenant"] == "alice"
        assert facts["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert facts["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
        assert facts["pellucid.request_id"] == reply.headers["x-request-id"]
        # One after the other, within the request.
        order = [found[name] for name in ("guard", "queue", "prefill", "decode")]
        times = [root.start_time_unix_nano, *(time for span in order for time in edges(span)), root.end_time_unix_nano]
        assert times == sorted(times), times
        assert abs(root.end_time_unix_nano / 1e9 - time.time()) < TIMEOUT_S
        # The service of the guard gets the trace, with the request's span as its caller.
        passed_on = [headers["traceparent"] for _, headers, _ in judge.requests]
        assert passed_on and set(passed_on) == {f"00-{TRACE}-{root.span_id.hex()}-01"}
        assert not any(SECRET.encode() in body for _, _, body in collector.requests), "a text is in a span"
        of_request = lambda line: TRACE in line and '"request"' in line
        line = until(lambda: list(filter(of_request, server.log)), "no line of the log")
        assert json.loads(line[0])["trace_id"] == TRACE
        # The last spans are sent before the program ends.
        server.get("/v1/models", key=ALICE)
    assert "GET /v1/models" in spans(collector)


def edges(span):
    return span.start_time_unix_nano, span.end_time_unix_nano


def test_a_stream_ends_with_its_last_byte_and_errors_are_told(binaries, model, collector):
    with Server(binaries, model, "--otlp-endpoint", collector.url) as server:
        server.complete("hello", stream=True, max_tokens=50, ignore_eos=True)
        root = until(lambda: spans(collector).get("POST /v1/completions"), "no trace")
        assert root.end_time_unix_nano >= spans(collector)["decode"].end_time_unix_nano
        assert not root.parent_span_id and root.status.code == root.status.STATUS_CODE_UNSET
        # The client does not record this one; monitoring has no spans at all.
        unsampled = f"00-{TRACE}-{CALLER}-00"
        assert server.ask("GET", "/v1/models", traceparent=unsampled).status == 200
        assert server.get("/health").status == server.get("/metrics").status == 200
        assert server.get("/v1/no-such-route").status == 404
        found = until(lambda: (all := spans(collector)) and "GET unknown" in all and all, "no trace of a wrong route")
        assert attributes(found["GET unknown"])["http.response.status_code"] == 404
        assert not any("models" in name or "health" in name or "metrics" in name for name in found), found


def test_a_collector_that_fails_costs_spans_alone(binaries, model):
    with Service(lambda: (500, b"")) as broken, Server(binaries, model, "--otlp-endpoint", broken.url) as server:
        assert server.complete("hello").status == 200
        until(lambda: server.metric("pellucid_spans_dropped_total") >= 4, "lost spans are not counted")
        assert server.metric("pellucid_spans_exported_total") == 0
        expected = "spans are not exported: the collector of --otlp-endpoint answers 500"
        assert any(expected in line for line in server.log)


def test_without_an_endpoint_nothing_is_recorded_and_the_trace_is_passed_on(binaries, model, judge):
    with Server(binaries, model, "--guard-url", judge.url) as server:
        given = f"00-{TRACE}-{CALLER}-01"
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()
        assert server.post("/v1/completions", body, traceparent=given).status == 200
        assert {headers["traceparent"] for _, headers, _ in judge.requests} == {given}
        assert "pellucid_spans" not in server.get("/metrics").body.decode()
