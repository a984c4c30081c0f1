"""Measures the throughput of `/v1/embeddings` over HTTP beside that of `pellucid embed`, in turns.

    python tests/measure_embeddings.py target/release MODEL_FOLDER [ROUNDS [PART]]

Every round computes the vectors of the same texts once in each way; the median round counts, since other work on the
machine slows all of them down. `pellucid embed` reads the texts from its standard input, and the time of a run with one
text, which loads the model, is subtracted. The server computes texts of requests that wait at the same time in one
batch, so requests of one text each are sent by one client and by eight. PART divides the number of texts.
"""

import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving import MODEL, Server

# Words of each text, and number of texts.
SHAPES = {"short": (8, 512), "medium": (60, 128), "long": (160, 48)}
WORDS = "river valley people turn fine day street bridge number light paper engine window garden letter".split()
NUM_CLIENTS = 8


def texts_of(num_words, count):
    """Returns texts that are the same on every machine; their lengths vary by a half."""
    generator = random.Random(num_words)
    lengths = [generator.randint(num_words // 2, num_words * 3 // 2) for _ in range(count)]
    return [" ".join(generator.choice(WORDS) for _ in range(length)) for length in lengths]


def post(server, texts, encoding):
    """Returns the tokens of one request."""
    reply = server.post("/v1/embeddings", {"model": MODEL, "input": texts, "encoding_format": encoding})
    assert reply.status == 200, reply.body
    return reply.json["usage"]["prompt_tokens"]


def run_program(program, model, texts):
    """Returns the seconds of a run of `pellucid embed`."""
    start = time.perf_counter()
    command = [str(program), "embed", str(model)]
    ran = subprocess.run(command, input="\n".join(texts), capture_output=True, text=True, check=True)
    assert len(ran.stdout.splitlines()) == len(texts)
    return time.perf_counter() - start


def main():
    binaries, model = Path(sys.argv[1]), Path(sys.argv[2])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    part = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    print("| texts | tokens each | `pellucid embed` | one request, base64 | one request, float | "
          f"one text a request | {NUM_CLIENTS} clients, one text a request |\n|---|---|---|---|---|---|---|")
    with Server(binaries, model) as server, ThreadPoolExecutor(NUM_CLIENTS) as clients:

        def timed(send):
            start = time.perf_counter()
            send()
            return time.perf_counter() - start

        for name, (num_words, count) in SHAPES.items():
            texts = texts_of(num_words, count // part)
            one_each = lambda text: post(server, [text], "base64")
            ways = [
                lambda: run_program(binaries / "pellucid", model, texts)
                - run_program(binaries / "pellucid", model, texts[:1]),
                lambda: timed(lambda: post(server, texts, "base64")),
                lambda: timed(lambda: post(server, texts, "float")),
                lambda: timed(lambda: list(map(one_each, texts))),
                lambda: timed(lambda: list(clients.map(one_each, texts))),
            ]
            num_tokens = post(server, texts, "base64")
            times = [[] for _ in ways]
            for i in range(rounds):
                # The order rotates, so that a change of the machine's speed meets all of them.
                for way in [(i + k) % len(ways) for k in range(len(ways))]:
                    times[way].append(ways[way]())
            speeds = " | ".join(f"{num_tokens / statistics.median(seconds):,.0f}" for seconds in times)
            print(f"| {len(texts)} {name} | {num_tokens / len(texts):.0f} | {speeds} |", flush=True)


if __name__ == "__main__":
    main()
