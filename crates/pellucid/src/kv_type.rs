//! Number formats of the KV cache.

use std::fmt;
use std::str::FromStr;

use pellucid_tensor::DType;

/// Number format of the keys and values that the KV cache holds.
///
/// The default, [`F16`](KvType::F16), takes half the memory of f32, with an error far below that of quantized weights.
/// A value beyond its range fails the request that computed it; it never becomes a wrong number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats with 10 bits of mantissa.
    #[default]
    F16,
    /// 16-bit floats with the range of f32 and 7 bits of mantissa.
    Bf16,
    /// 8-bit integers in blocks of 32 with one scale each. Requires a head size that is a multiple of 32.
    Q8_0,
}

impl KvType {
    /// Every format.
    pub const ALL: [KvType; 4] = [KvType::F32, KvType::F16, KvType::Bf16, KvType::Q8_0];

    /// Returns the name that [`FromStr`] reads.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Bf16 => "bf16",
            KvType::Q8_0 => "q8_0",
        }
    }

    /// Returns the tensor format that stores it.
    pub fn dtype(self) -> DType {
        match self {
            KvType::F32 => DType::F32,
            KvType::F16 => DType::F16,
            KvType::Bf16 => DType::BF16,
            KvType::Q8_0 => DType::Q8_0,
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = KvType::ALL.into_iter().find(|kv_type| kv_type.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| format!("expected {}, found {text:?}", KvType::ALL.map(KvType::name).join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_in_any_case() {
        for kv_type in KvType::ALL {
            assert_eq!(kv_type.to_string().to_uppercase().parse(), Ok(kv_type));
        }
        let error = "f64".parse::<KvType>().expect_err("there is no such format");
        assert_eq!(error, "expected f32, f16, bf16, q8_0, found \"f64\"");
    }
}
