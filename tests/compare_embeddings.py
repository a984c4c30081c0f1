"""Compares the speed of embeddings with sentence-transformers on this machine's CPU, in turns.

    python compare_embeddings.py PELLUCID MODEL_FOLDER [ROUNDS [PART]]

PELLUCID is the built program, MODEL_FOLDER a Hugging Face folder that both read. The packages are those of
`crates/selftest/fixtures/requirements.txt` and sentence-transformers. Both get the same texts in the same order:
Pellucid as one HTTP request to its server, sentence-transformers as one call in this process with its default batch
size. Before anything is measured, the vectors are compared. Each round measures each program once; the median round
counts, since other work on the machine slows both down. PART divides the number of texts.
"""

import base64
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

# Words of each text, and number of texts.
SHAPES = {"short": (8, 512), "medium": (60, 128), "long": (160, 48)}


def texts_of(num_words: int, count: int) -> list[str]:
    """Returns texts of English-like words that are the same on every machine; their lengths vary by a half."""
    generator = random.Random(num_words)
    words = "river valley people turn fine day street bridge number light paper engine window garden letter".split()
    lengths = [generator.randint(num_words // 2, num_words * 3 // 2) for _ in range(count)]
    return [" ".join(generator.choice(words) for _ in range(length)) for length in lengths]


class Server:
    def __init__(self, program: str, folder: str):
        arguments = [program, "serve", "--model", folder, "--port", "0", "--log-format", "json"]
        self.process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found.group(1))
                break
        else:
            raise SystemExit("the server did not start")

    def embed(self, texts: list[str]) -> tuple[np.ndarray, int]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        body = json.dumps({"model": Path(sys.argv[2]).name, "input": texts, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        reply = json.loads(connection.getresponse().read())
        if "error" in reply:
            raise SystemExit(reply["error"])
        vectors = [np.frombuffer(base64.b64decode(one["embedding"]), dtype="<f4") for one in reply["data"]]
        return np.stack(vectors), reply["usage"]["prompt_tokens"]


def main() -> None:
    program, folder = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    reference = SentenceTransformer(folder, device="cpu")
    server = Server(program, folder)
    encode = lambda texts: reference.encode(texts, normalize_embeddings=True, convert_to_numpy=True)
    print(f"torch {torch.__version__} with {torch.get_num_threads()} threads; {rounds} rounds in turns")
    print("| texts | tokens each | largest difference | Pellucid, tokens/s | sentence-transformers, tokens/s | ratio |")
    print("|---|---|---|---|---|---|")
    try:
        for name, (num_words, count) in SHAPES.items():
            count //= int(sys.argv[4]) if len(sys.argv) > 4 else 1
            texts = texts_of(num_words, count)
            found, tokens = server.embed(texts)
            difference = np.abs(found - encode(texts)).max()
            times = [[], []]
            for _ in range(rounds):
                for index, run in enumerate([server.embed, encode]):
                    start = time.perf_counter()
                    run(texts)
                    times[index].append(time.perf_counter() - start)
            ours, theirs = (tokens / statistics.median(seconds) for seconds in times)
            speeds = f"{ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f}"
            print(f"| {name} | {tokens / count:.0f} | {difference:.1e} | {speeds} |", flush=True)
    finally:
        server.process.terminate()


if __name__ == "__main__":
    main()
