//! The type numbers of GGUF tensors, and which of the types are supported.

use pellucid_tensor::DType;

/// Returns the type number of a format; `None` for one that the file format does not have.
pub(crate) fn number(dtype: DType) -> Option<u32> {
    Some(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q5_0 => 6,
        DType::Q5_1 => 7,
        DType::Q8_0 => 8,
        DType::Q2_K => 10,
        DType::Q3_K => 11,
        DType::Q4_K => 12,
        DType::Q5_K => 13,
        DType::Q6_K => 14,
        DType::IQ4_NL => 20,
        DType::IQ4_XS => 23,
        DType::BF16 => 30,
        DType::MXFP4 => 39,
        DType::NVFP4 => 40,
        DType::IQ1_S => 19,
        DType::IQ1_M => 29,
        DType::IQ2_XXS => 16,
        DType::IQ2_XS => 17,
        DType::IQ2_S => 22,
        DType::IQ3_XXS => 18,
        DType::IQ3_S => 21,
        DType::TQ1_0 => 34,
        DType::TQ2_0 => 35,
        DType::F8_E4M3 => return None,
    })
}

/// Returns the format of a type number, or the name of an unsupported type.
pub(crate) fn dtype(number: u32) -> Result<DType, String> {
    let found = DType::ALL.into_iter().find(|&dtype| self::number(dtype) == Some(number));
    found.ok_or_else(|| unsupported_name(number))
}

/// Returns the name of a type that exists and is not supported, so that the message has more than a number.
fn unsupported_name(number: u32) -> String {
    let name = match number {
        4 => "Q4_2 (removed from the format)",
        5 => "Q4_3 (removed from the format)",
        9 => "Q8_1",
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        31..=33 => "Q4_0 repacked (removed from the format)",
        36..=38 => "IQ4_NL repacked (removed from the format)",
        41 => "Q1_0",
        _ => "unknown",
    };
    format!("{name} (number {number})")
}

/// Returns the supported types as a list for messages.
pub(crate) fn supported() -> String {
    let names: Vec<&str> = DType::ALL.into_iter().filter(|&dtype| number(dtype).is_some()).map(DType::name).collect();
    names.join(", ")
}
