//! GGUF files made by hand: a header, key/value pairs, tensors.

/// A GGUF file in the making.
#[derive(Default)]
pub(crate) struct Gguf {
    pairs: Vec<u8>,
    num_pairs: u64,
    tensors: Vec<u8>,
    num_tensors: u64,
    data: Vec<u8>,
}

const U32: u32 = 4;
const I32: u32 = 5;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

impl Gguf {
    fn pair(mut self, key: &str, kind: u32, value: &[u8]) -> Gguf {
        self.pairs.extend(string(key));
        self.pairs.extend(kind.to_le_bytes());
        self.pairs.extend(value);
        self.num_pairs += 1;
        self
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> Gguf {
        self.pair(key, U32, &value.to_le_bytes())
    }

    pub(crate) fn bool(self, key: &str, value: bool) -> Gguf {
        self.pair(key, BOOL, &[u8::from(value)])
    }

    pub(crate) fn str(self, key: &str, value: &str) -> Gguf {
        self.pair(key, STRING, &string(value))
    }

    pub(crate) fn strings(self, key: &str, values: &[String]) -> Gguf {
        let mut bytes = array_head(STRING, values.len());
        values.iter().for_each(|value| bytes.extend(string(value)));
        self.pair(key, ARRAY, &bytes)
    }

    pub(crate) fn i32s(self, key: &str, values: &[i32]) -> Gguf {
        let mut bytes = array_head(I32, values.len());
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        self.pair(key, ARRAY, &bytes)
    }

    /// A tensor of F32 zeros; `shape` is outermost first.
    pub(crate) fn tensor(mut self, name: &str, shape: &[u64]) -> Gguf {
        self.tensors.extend(string(name));
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|size| self.tensors.extend(size.to_le_bytes()));
        self.tensors.extend(0_u32.to_le_bytes());
        self.tensors.extend((self.data.len() as u64).to_le_bytes());
        let bytes = 4 * shape.iter().product::<u64>() as usize;
        self.data.resize((self.data.len() + bytes).next_multiple_of(32), 0);
        self.num_tensors += 1;
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(self.num_tensors.to_le_bytes());
        bytes.extend(self.num_pairs.to_le_bytes());
        bytes.extend(&self.pairs);
        bytes.extend(&self.tensors);
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(&self.data);
        bytes
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn array_head(kind: u32, len: usize) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &(len as u64).to_le_bytes()].concat()
}

/// A byte-level vocabulary: id N is the byte N, then the merged pieces, then `<s>` and `<|end|>` as control tokens.
pub(crate) fn byte_vocabulary() -> Gguf {
    let mut tokens: Vec<String> = (0..=255_u8).map(|byte| letter(byte).to_string()).collect();
    let mut kinds = vec![1; 256];
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ hello"];
    for merge in merges {
        tokens.push(merge.replace(' ', ""));
        kinds.push(1);
    }
    for control in ["<s>", "<|end|>"] {
        tokens.push(control.to_owned());
        kinds.push(3);
    }
    let merges: Vec<_> = merges.iter().map(|merge| merge.to_string()).collect();
    Gguf::default()
        .str("general.architecture", "llama")
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "gpt-2")
        .strings("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &kinds)
        .strings("tokenizer.ggml.merges", &merges)
        .u32("tokenizer.ggml.bos_token_id", 261)
        .u32("tokenizer.ggml.eos_token_id", 262)
        .bool("tokenizer.ggml.add_bos_token", true)
}

/// GPT-2's printable letter for a byte: the byte itself where it prints, else the next letter from U+0100 on.
fn letter(byte: u8) -> char {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if prints(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !prints(*other)).count() as u32;
    char::from_u32(0x100 + before).unwrap()
}
