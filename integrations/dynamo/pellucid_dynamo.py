"""A worker of NVIDIA Dynamo that forwards requests to a running Pellucid, with token ids in both directions.

Dynamo's frontend tokenizes and detokenizes; its router follows the KV events of the server. Every option of a request
is passed on or refused by name.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import aiohttp
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig

# Options that have the same name and meaning in Pellucid's API.
SAMPLING = ["temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"]
SAMPLING += ["repetition_penalty", "length_penalty"]
# The frontend looks for stop strings, and removes end tokens, in the text that it makes of the ids.
HANDLED_BY_FRONTEND = {"stop", "stop_token_ids_hidden", "include_stop_str_in_output"}


def given(options: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the options that have a value."""
    is_given = lambda value: value is not None and value is not False and value != [] and value != {}
    return {name: value for name, value in (options or {}).items() if is_given(value)}


def body_of(request: dict[str, Any], model: str, context: int) -> dict[str, Any]:
    """Returns the completion request for a request of Dynamo."""
    ids = request["token_ids"]
    body = {"model": model, "prompt": ids, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True, "include_obfuscation": False}
    sampling = given(request.get("sampling_options"))
    for name in SAMPLING:
        if name in sampling:
            body[name] = sampling.pop(name)
    # Dynamo writes -1 for "off".
    if body.get("top_k") == -1:
        del body["top_k"]
    guided = given(sampling.pop("guided_decoding", None))
    if guided:
        body["structured_outputs"] = guided
    for name, default in (("n", 1), ("best_of", 1)):
        if sampling.get(name) == default:
            del sampling[name]
    stop = given(request.get("stop_conditions"))
    body["max_tokens"] = stop.pop("max_tokens", context - len(ids))
    for name in ("min_tokens", "ignore_eos"):
        if name in stop:
            body[name] = stop.pop(name)
    if "stop_token_ids" in stop:
        body["stop_token_ids"] = stop.pop("stop_token_ids")
    output = given(request.get("output_options"))
    refused = {*sampling, *stop} - HANDLED_BY_FRONTEND
    refused |= {"logprobs", "prompt_logprobs"} & output.keys()
    if refused:
        raise ValueError(f"this worker does not support {', '.join(sorted(refused))}")
    salt = (request.get("routing") or {}).get("cache_salt")
    salt = salt or ((request.get("extra_args") or {}).get("nvext") or {}).get("cache_salt")
    if salt:
        body["cache_salt"] = salt
    return body


class PellucidEngine(LLMEngine):
    """Forwards requests to the server at `url`."""

    def __init__(self, url: str, model_path: str, kv_events: str | None, key: str | None):
        self.url, self.model_path, self.kv_events = url.rstrip("/"), model_path, kv_events
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.session: aiohttp.ClientSession | None = None
        self.model, self.context = "", 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[PellucidEngine, WorkerConfig]:
        parser = argparse.ArgumentParser(description="Registers a running Pellucid with Dynamo.")
        parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
        parser.add_argument("--model-path", required=True, help="folder with tokenizer.json and config.json")
        parser.add_argument("--served-model-name", help="name in Dynamo [default: that of the server]")
        parser.add_argument("--kv-events", help="address that the server's --kv-events names")
        parser.add_argument("--endpoint-types", default="chat,completions", help="without a chat template: completions")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--component", default="pellucid")
        parser.add_argument("--discovery-backend", default="file", choices=["file", "etcd", "kubernetes", "mem"])
        args = parser.parse_args(argv)
        engine = cls(args.url, args.model_path, args.kv_events, os.environ.get("PELLUCID_API_KEY"))
        name = args.served_model_name or (await engine.served())["id"]
        return engine, WorkerConfig(
            namespace=args.namespace,
            component=args.component,
            model_name=args.model_path,
            served_model_name=name,
            endpoint_types=args.endpoint_types,
            discovery_backend=args.discovery_backend,
            enable_kv_routing=args.kv_events is not None,
            use_kv_events=args.kv_events is not None,
        )

    async def served(self) -> dict[str, Any]:
        """Returns the server's description of its first model."""
        async with aiohttp.ClientSession(headers=self.headers) as session:
            async with session.get(f"{self.url}/v1/models") as response:
                response.raise_for_status()
                return (await response.json())["data"][0]

    async def start(self, worker_id: int) -> EngineConfig:
        served = await self.served()
        self.model, self.context = served["id"], served["max_model_len"]
        # A reply may take longer than any fixed time; the server has a limit of its own.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0)
        self.session = aiohttp.ClientSession(headers=self.headers, timeout=timeout, connector=connector)
        registration = LlmRegistration(
            context_length=self.context,
            kv_cache_block_size=served["kv_block"]["positions"],
        )
        return EngineConfig(model=self.model_path, served_model_name=self.model, llm=registration)

    async def kv_event_sources(self) -> list[ZmqSource]:
        return [ZmqSource(endpoint=self.kv_events)] if self.kv_events else []

    async def generate(self, request, context):
        body = body_of(request, self.model, self.context)
        held: list[int] = []
        finish, usage, count = None, None, 0
        # Leaving this block closes the connection, which cancels the request on the server.
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"the server answered {response.status}: {await response.text()}")
            async for line in response.content:
                if context.is_stopped():
                    yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                    return
                data = line.decode().strip().removeprefix("data: ")
                if not data.startswith("{"):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    ids = choice["token_ids"]
                    count += len(ids)
                    finish = choice["finish_reason"] or finish
                    if finish is None and ids:
                        yield {"token_ids": ids, "index": 0}
                    elif finish is not None:
                        held = ids
        if finish is None or usage is None:
            raise RuntimeError("the server ended the reply before it was complete")
        # The token that ended the reply is no part of it, and is not counted.
        if count > usage["completion_tokens"]:
            held = held[:-1]
        names = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
        usage = {name: usage[name] for name in names}
        yield {"token_ids": held, "index": 0, "finish_reason": finish, "completion_usage": usage}

    async def cleanup(self) -> None:
        if self.session is not None:
            await self.session.close()


def main() -> None:
    run(PellucidEngine)


if __name__ == "__main__":
    main()
