"""Copies a GGUF file and adds a chat template and an end token to its metadata: add_chat_template.py SOURCE TARGET

Only the header changes: two keys are appended, and the tensors move by the added bytes, rounded up to the file's
alignment. Needs nothing but Python's standard library.
"""

import struct
import sys

# The text of all messages, one on each line: the model knows no roles, it continues stories.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
# The model was trained on stories that begin with this token and have no other mark at their end.
END_TOKEN = 1
ALIGNMENT = 32  # GGUF's default; the source does not set general.alignment.
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UINT32, STRING, ARRAY = 4, 8, 9


def main(source, target):
    data = open(source, 'rb').read()
    magic, version, num_tensors, num_keys = struct.unpack_from('<4sIQQ', data)
    assert magic == b'GGUF' and version == 3, 'expected a GGUF file of version 3'
    at = 24

    def number(kind):
        nonlocal at
        (value,) = struct.unpack_from('<' + kind, data, at)
        at += struct.calcsize(kind)
        return value

    def skip(kind):
        nonlocal at
        if kind == STRING:
            length = number('Q')
            at += length
        elif kind == ARRAY:
            element, length = number('I'), number('Q')
            for _ in range(length):
                skip(element)
        else:
            at += SIZES[kind]

    for _ in range(num_keys):
        skip(STRING)
        skip(number('I'))
    keys_end = at
    for _ in range(num_tensors):
        skip(STRING)
        num_dimensions = number('I')
        at += 8 * num_dimensions + 4 + 8  # the dimensions, the format, the offset
    infos_end = at

    def entry(key, kind, value):
        return struct.pack('<Q', len(key)) + key + struct.pack('<I', kind) + value

    text = TEMPLATE.encode()
    added = entry(b'tokenizer.chat_template', STRING, struct.pack('<Q', len(text)) + text)
    added += entry(b'tokenizer.ggml.eot_token_id', UINT32, struct.pack('<I', END_TOKEN))
    header = (
        struct.pack('<4sIQQ', magic, version, num_tensors, num_keys + 2)
        + data[24:keys_end]
        + added
        + data[keys_end:infos_end]
    )
    tensors = data[infos_end + -infos_end % ALIGNMENT :]
    open(target, 'wb').write(header + bytes(-len(header) % ALIGNMENT) + tensors)


if __name__ == '__main__':
    main(*sys.argv[1:])
