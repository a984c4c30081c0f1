#!/usr/bin/env python3
"""Writes the seeds of the fuzz targets: small valid inputs, from which the fuzzer begins.

    python3 fuzz/make_seeds.py

The formats of the inputs are described at the head of each target.
"""

import json
import pathlib
import struct

SEEDS = pathlib.Path(__file__).parent / "seeds"
KEY = "q8Zk-SECRET-x7"


def write(target, name, contents):
    folder = SEEDS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())


# GGUF: numbers of the types of metadata values.
U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def gguf_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(kind, value):
    if kind == STRING:
        return gguf_string(value)
    if kind == ARRAY:
        inner, values = value
        body = b"".join(gguf_value(inner, item) for item in values)
        return struct.pack("<IQ", inner, len(values)) + body
    return struct.pack({U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q"}[kind], value)


def gguf(metadata, tensors, version=3, alignment=32):
    """A file with F32 (type 0) and Q8_0 (type 8) tensors of zeros; shapes have the contiguous dimension first."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, kind, value in metadata:
        out += gguf_string(key) + struct.pack("<I", kind) + gguf_value(kind, value)
    offset = 0
    for name, shape, kind in tensors:
        out += gguf_string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        out += struct.pack("<IQ", kind, offset)
        elements = 1
        for dim in shape:
            elements *= dim
        size = elements * 4 if kind == 0 else elements // 32 * 34
        offset += -(-size // alignment) * alignment
    out += bytes(-len(out) % alignment)
    return out + bytes(offset)


LLAMA = [
    ("general.architecture", STRING, "llama"),
    ("llama.context_length", U32, 64),
    ("llama.embedding_length", U32, 8),
    ("llama.block_count", U32, 1),
    ("llama.feed_forward_length", U32, 8),
    ("llama.attention.head_count", U32, 2),
    ("llama.attention.head_count_kv", U32, 1),
    ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
    ("llama.rope.dimension_count", U32, 4),
    ("llama.vocab_size", U32, 8),
]
PIECES = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a"]
TOKENIZER = [
    ("tokenizer.ggml.model", STRING, "llama"),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, PIECES)),
    ("tokenizer.ggml.scores", ARRAY, (F32, [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -0.5, -0.25])),
    ("tokenizer.ggml.token_type", ARRAY, (U32, [2, 3, 3, 1, 1, 1, 1, 1])),
    ("tokenizer.ggml.bos_token_id", U32, 1),
    ("tokenizer.ggml.eos_token_id", U32, 2),
    ("tokenizer.ggml.add_bos_token", BOOL, True),
    ("tokenizer.chat_template", STRING, "{% for m in messages %}{{ m.content }}{% endfor %}"),
]
BYTE_LEVEL = [
    ("tokenizer.ggml.model", STRING, "gpt2"),
    ("tokenizer.ggml.pre", STRING, "gpt-2"),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "b", "ab", "\u0120", "\u0120a", "<s>", "c", "d"])),
    ("tokenizer.ggml.merges", ARRAY, (STRING, ["a b", "\u0120 a"])),
    ("tokenizer.ggml.token_type", ARRAY, (U32, [1, 1, 1, 1, 1, 3, 1, 1])),
]
LAYER = [
    ("token_embd.weight", [8, 8], 0),
    ("output_norm.weight", [8], 0),
    ("blk.0.attn_norm.weight", [8], 0),
    ("blk.0.attn_q.weight", [8, 8], 0),
    ("blk.0.attn_k.weight", [8, 4], 0),
    ("blk.0.attn_v.weight", [8, 4], 0),
    ("blk.0.attn_output.weight", [8, 8], 0),
    ("blk.0.ffn_norm.weight", [8], 0),
    ("blk.0.ffn_gate.weight", [8, 8], 0),
    ("blk.0.ffn_up.weight", [8, 8], 0),
    ("blk.0.ffn_down.weight", [8, 8], 0),
]


def make_gguf():
    write("gguf", "empty", gguf([], []))
    write("gguf", "metadata", gguf(LLAMA + TOKENIZER, []))
    write("gguf", "byte-level", gguf(LLAMA + BYTE_LEVEL, []))
    write("gguf", "model", gguf(LLAMA + TOKENIZER, LAYER))
    write("gguf", "quantized", gguf([("general.alignment", U32, 64)], [("a", [32, 2], 8), ("b", [3], 0)], alignment=64))
    nested = ("a", ARRAY, (ARRAY, [(U32, [1, 2]), (STRING, ["x"])]))
    write("gguf", "nested", gguf([nested, ("n", U64, 2**40)], [], version=2))


CONFIG = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
NAMES = {
    "model.embed_tokens.weight": [8, 8], "model.norm.weight": [8],
    "model.layers.0.input_layernorm.weight": [8], "model.layers.0.post_attention_layernorm.weight": [8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8], "model.layers.0.self_attn.k_proj.weight": [4, 8],
    "model.layers.0.self_attn.v_proj.weight": [4, 8], "model.layers.0.self_attn.o_proj.weight": [8, 8],
    "model.layers.0.mlp.gate_proj.weight": [8, 8], "model.layers.0.mlp.up_proj.weight": [8, 8],
    "model.layers.0.mlp.down_proj.weight": [8, 8],
}  # fmt: skip


WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}


def safetensors(shapes, dtype="F32"):
    """A file of zeros. A shape may be a pair of another type and the shape."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, entry in shapes.items():
        dtype_of, shape = entry if isinstance(entry, tuple) else (dtype, entry)
        size = WIDTHS[dtype_of]
        for dim in shape:
            size *= dim
        header[name] = {"dtype": dtype_of, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(offset)


def make_safetensors():
    def folder(config, weights):
        return json.dumps(config).encode() + b"\0" + weights

    write("safetensors", "model", folder(CONFIG, safetensors(NAMES)))
    write("safetensors", "half", folder(CONFIG | {"torch_dtype": "bfloat16"}, safetensors(NAMES, "BF16")))
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
    write("safetensors", "scaled", folder(CONFIG | {"rope_scaling": scaling}, safetensors({"a": [2, 3]})))
    write("safetensors", "gemma", folder(CONFIG | {"model_type": "gemma3_text", "sliding_window": 16}, safetensors({})))

    # A small folder of each quantization scheme; zeros are valid codes, scales, zero points and indices.
    def quantized(name, config, shapes):
        write("safetensors", name, folder(CONFIG | {"quantization_config": config}, safetensors(shapes)))

    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": False}
    parts = {"x.qweight": ("I32", [2, 8]), "x.qzeros": ("I32", [2, 1]), "x.scales": ("F16", [2, 8])}
    quantized("gptq", gptq, parts | {"x.g_idx": ("I32", [16])})
    awq = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
    quantized("awq", awq, parts | {"x.qweight": ("I32", [16, 1])})
    fp8 = {"quant_method": "fp8", "weight_block_size": [2, 128]}
    quantized("fp8", fp8, {"x.weight": ("F8_E4M3", [4, 128]), "x.weight_scale_inv": [2, 1]})
    blocks = {"x_blocks": ("U8", [2, 3, 1, 16]), "x_scales": ("U8", [2, 3, 1])}
    quantized("mxfp4", {"quant_method": "mxfp4"}, blocks)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    groups = {"a": {"weights": weights}}
    compressed = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    scales = {"x.weight_scale": ("BF16", [4, 1]), "x.weight_zero_point": ("I8", [4, 1])}
    quantized("int8", compressed, {"x.weight": ("I8", [4, 8])} | scales)


def make_tokenizer_json():
    added = [{"id": 3, "content": "<s>", "single_word": False, "lstrip": True, "rstrip": False, "normalized": False,
              "special": True}]  # fmt: skip
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None}  # fmt: skip
    bpe = {"type": "BPE", "unk_token": None, "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3, "\u0120": 4},
           "merges": ["a b"]}  # fmt: skip
    regex = "\\p{L}+|\\s+(?!\\S)|\\s+|."
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    byte_level = base | {"model": bpe, "decoder": level,
                         "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}  # fmt: skip
    write("tokenizer_json", "byte-level", json.dumps(byte_level) + "\0abba <s> ab")
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
               "vocab": [["<unk>", 0.0], ["\u2581", -1.5], ["a", -2.0], ["<s>", 0.0], ["\u2581a", -1.0]]}  # fmt: skip
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"},
                  {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]}  # fmt: skip
    write("tokenizer_json", "unigram", json.dumps(
        base | {"model": unigram, "pre_tokenizer": space, "decoder": space, "normalizer": normalizer}) + "\0A  a")


def make_chat_template():
    loop = "{% for m in messages %}<s>{{ m.role }}: {{ m['content'] | trim }}</s>{% endfor %}"
    text = "\u27e6\u00a7\u27e7 hello \u27e6/think\u00a7\u27e7"
    for name, template in {
        "loop": loop + "{% if add_generation_prompt %}<s>assistant{% endif %}",
        "replace": "{{ messages[0].content.replace('/think', '').split('</s>')[-1].strip() }}",
        "join": "{% set n= namespace(t='') %}{% for m in messages %}{% set n.t = n.t~m.content %}{% endfor %}{{ n.t }}",
        "macro": "{% macro f(x) %}{{ x | upper | replace('A', '') }}{% endmacro %}{{ f(messages[0].content) }}",
        "slice": "{{ messages[0].content[1:] }}{{ messages | map(attribute='content') | join('') | tojson }}",
        "loops": "{% for a in range(9) %}{% for b in messages[0].content %}{{ loop.index~b }}{% endfor %}{% endfor %}",
    }.items():
        write("chat_template", name, template + "\0" + text + "\1\u27e6\u00a7\u27e7")


def make_json_body():
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "h\u00e9llo \U0001f600"}], "max_tokens": 4,
            "temperature": 0.7, "stop": ["a"], "logit_bias": {"3": -1.5}, "n": 2, "seed": 2**64 - 1}  # fmt: skip
    write("json_body", "chat", json.dumps(chat))
    write("json_body", "raw", json.dumps(chat, ensure_ascii=False, indent=1))
    write("json_body", "numbers", "[0,-0,1e5,1E-5,0.1,-9223372036854775808,9223372036854775808,1e308,true,null]")
    write("json_body", "nested", '{"a":[[[{"b":{"c":"\\u0041\\ud83d\\ude00\\n"}}]]],"":{}}')


def make_websocket():
    request = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12})
    write("websocket", "plain", f"t{request}")
    controls = ['t{"type":"pause"}', 't{"type":"resume"}', "w", 't{"type":"update","temperature":1.5}']
    write("websocket", "control", "\n".join([f"t{request}", "w", *controls]))
    write("websocket", "cancel", f'pping\nt{request}\nw\nw\nt{{"type":"cancel"}}\nw\nx\u0003\u00e8')
    write("websocket", "fragments", f"f{request[:20]}\npx\nc{request[20:40]}\ne{request[40:]}\nw\nqpong\nt[]\nbx")
    several = request.replace("12}", '9, "n": 3, "logprobs": true, "top_logprobs": 2}')
    write("websocket", "several", f"t{several}\nw\nx")


def make_sampler():
    for index in range(6):
        # Any bytes are an input; these set a few options each.
        write("sampler", f"options-{index}", bytes((i * 37 + index * 11) % 251 for i in range(60 + 40 * index)))


def make_stop_filter():
    write("stop_filter", "two", "stop\nend\0some te\1xt st\1o\1p here")
    write("stop_filter", "overlap", "aab\nab\nb\0aa\1a\1ab")
    write("stop_filter", "characters", "\u00e9\u00e8\n\U0001f600\0caf\u00e9\1\u00e8 \U0001f600")


def make_keys_file():
    write("keys_file", "toml", f'[[tenant]]\nname = "a"\nkeys = ["{KEY}"]\nrequests_per_minute = 5\n\n'
          f'[[tenant]]\nname = "b"\nkeys_sha256 = ["{"ab" * 32}"]\ntrace = true\nkv_tokens = 64\n')  # fmt: skip
    write("keys_file", "json", json.dumps({"tenant": [{"name": "a", "keys": [KEY], "concurrent_requests": 2}]}))
    write("keys_file", "misplaced", f'[[tenant]]\nname = "a"\nkeys = "{KEY}"\n')
    write("keys_file", "unknown", f'[[tenant]]\nname = "a"\n{KEY} = 1\nkv_tokens = "{KEY}"\n')


if __name__ == "__main__":
    for make in [make_gguf, make_safetensors, make_tokenizer_json, make_chat_template, make_json_body, make_websocket,
                 make_sampler, make_stop_filter, make_keys_file]:  # fmt: skip
        make()
