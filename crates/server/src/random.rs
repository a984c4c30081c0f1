//! Random bytes of the operating system, for secrets, ids and padding.

/// Returns 64 random bits.
pub(crate) fn word() -> u64 {
    let mut bytes = [0; 8];
    fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

/// Returns 32 random bytes, for secrets that last as long as the process.
pub(crate) fn secret() -> [u8; 32] {
    let mut bytes = [0; 32];
    fill(&mut bytes);
    bytes
}

fn fill(bytes: &mut [u8]) {
    getrandom::fill(bytes).expect("the operating system gives random bytes");
}

/// Returns an id such as `chatcmpl-1f…`, with 96 random bits.
pub(crate) fn id(prefix: &str) -> String {
    let mut bytes = [0; 12];
    fill(&mut bytes);
    let digit = |bits: u8| char::from(b"0123456789abcdef"[usize::from(bits)]);
    let mut id = String::with_capacity(prefix.len() + 2 * bytes.len());
    id.push_str(prefix);
    id.extend(bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]));
    id
}

/// Sizes in bytes to whose multiples content is padded: `TEXT_UNIT` for short text, `LONG_UNIT` for longer content.
const TEXT_UNIT: usize = 32;
const LONG_UNIT: usize = 1024;

/// Generates padding. Only its length matters, so a xorshift generator is enough.
#[derive(Debug)]
pub(crate) struct Padding(u64);

impl Padding {
    pub(crate) fn new() -> Padding {
        Padding(word() | 1)
    }

    /// Returns padding for content of `len` bytes, so that sizes do not reveal the lengths of tokens.
    pub(crate) fn for_len(&mut self, len: usize) -> String {
        let unit = if len > 4 * TEXT_UNIT { LONG_UNIT } else { TEXT_UNIT };
        self.letters().take(len.max(1).next_multiple_of(unit) - len).map(char::from).collect()
    }

    /// Returns endless ASCII letters.
    fn letters(&mut self) -> impl Iterator<Item = u8> {
        const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        std::iter::repeat_with(|| {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            LETTERS[(self.0 >> 32) as usize % 64]
        })
    }
}
