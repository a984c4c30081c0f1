"""Measures what a dialect costs over the plain route: the same prompt with one token to generate, by turns.

    python tests/compare_dialects.py --binaries target/release --requests 2000

Every round sends the request once to each route, on one connection each, in an order that rotates, so that a change of
the machine's speed meets all of them. It prints the median time of each route and the median of the differences from
`/v1/chat/completions` (from `/v1/completions` for llama.cpp's `/completion`) within a round.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from serving import MODEL, Server, write_model

HELLO = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"model": MODEL, "messages": HELLO, "max_tokens": 1, "seed": 1},
    "/v1/messages": {"model": MODEL, "messages": HELLO, "max_tokens": 1, "seed": 1},
    "/v1/responses": {"model": MODEL, "input": HELLO, "max_output_tokens": 1, "seed": 1, "store": False},
    "/api/chat": {"model": MODEL, "messages": HELLO, "stream": False, "options": {"num_predict": 1, "seed": 1}},
    TEXT: {"model": MODEL, "prompt": "hello", "max_tokens": 1, "seed": 1},
    "/completion": {"prompt": "hello", "n_predict": 1, "seed": 1},
}
# Measured apart: a tenant that has stored responses may name them.
STORED = {
    CHAT: BODIES[CHAT],
    "/v1/responses, not stored": BODIES["/v1/responses"],
    "/v1/responses, stored": {"model": MODEL, "input": HELLO, "max_output_tokens": 1, "seed": 1},
}


def measure(server, bodies, num_requests):
    """Returns the times of each route in milliseconds, one of each for every round."""
    times = {name: [] for name in bodies}
    names = list(bodies)
    warm_up = max(num_requests // 10, 20)
    for i in range(num_requests + warm_up):
        for name in names[i % len(names):] + names[:i % len(names)]:
            start = time.perf_counter()
            reply = server.post(name.split(",")[0], bodies[name], anthropic_version="2023-06-01")
            elapsed = (time.perf_counter() - start) * 1000
            assert reply.status == 200, reply.body
            if i >= warm_up:
                times[name].append(elapsed)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=Path, default=Path("target/release"))
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(options.binaries, Path(folder), "4096", "words")
        with Server(options.binaries, model) as server:
            print("| route | median ms | over the plain route, ms |\n|---|---:|---:|")
            show(measure(server, BODIES, options.requests))
            show(measure(server, STORED, options.requests))


def show(times):
    for name, own in times.items():
        plain = TEXT if name in (TEXT, "/completion") else CHAT
        differences = [one - other for one, other in zip(own, times[plain])]
        over = "" if name == plain else f"{statistics.median(differences):+.3f}"
        print(f"| `{name}` | {statistics.median(own):.3f} | {over} |")


if __name__ == "__main__":
    main()
