//! The map of this folder: [`kernel_for`] says which kernel multiplies a weight, and holds every threshold on the
//! number of rows.
//!
//! A kernel is chosen once for each product, before its tasks run ([`super::Multiplier`]); tasks match on the result.
//! The choice changes speed alone: all kernels of a format on one instruction set give the same bits, whatever the
//! number of rows.

use pellucid_tensor::DType;

use super::BLOCK_ROWS;
use super::quantized::activations::InputOrder;
use super::quantized::panel_layout::{PanelLayout, QuantizedFormat, Scales, with_quantized_format};
use crate::simd::Level;

/// From this number of rows on, AVX-512 without AMX multiplies quantized weights eight rows at a time, which needs x
/// ordered by words.
const MIN_ROWS_BY_WORD: usize = 5;

/// From this number of rows on, AVX-512 multiplies unquantized weights eight rows at a time, which needs x interleaved.
const MIN_ROWS_INTERLEAVED: usize = 5;

/// From this number of rows on, a gated pair of BF16 products is computed as one. With fewer rows, reading the weights
/// takes all the time, and threads read one weight to its end faster than two in turns.
#[cfg(target_arch = "x86_64")]
const MIN_ROWS_BF16_GATED: usize = 3;

/// From this number of rows on, AMX is faster than AVX-512 VNNI with weights of this layout: later for Q6_K, which
/// costs most to unpack.
pub(super) const fn min_rows_amx(layout: &PanelLayout) -> usize {
    match layout.scales {
        Scales::Float | Scales::BrainFloat | Scales::Single | Scales::PerSlice => 5,
        Scales::PerHalfSlice => 9,
    }
}

/// Instructions that products use: the level, and the extensions within a level that only products know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "a target constructs only its own instructions, and the table has them all")]
pub(super) enum Instructions {
    Scalar,
    Neon,
    /// NEON with `sdot`.
    NeonDotProduct,
    Avx2,
    /// AVX2 with AVX-VNNI.
    AvxVnni,
    /// AVX-512 without VNNI, as the first processors had it.
    Avx512,
    /// AVX-512 with VNNI.
    Avx512Vnni,
    /// AMX, and AVX-512 with VNNI.
    Amx,
}

impl Instructions {
    /// The instructions of a level, with the extensions that this machine has.
    pub(super) fn of(level: Level) -> Self {
        match level {
            Level::Scalar(_) => Instructions::Scalar,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) if super::quantized::neon::has_dot_products() => Instructions::NeonDotProduct,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => Instructions::Neon,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) if is_x86_feature_detected!("avxvnni") => Instructions::AvxVnni,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Instructions::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) if is_x86_feature_detected!("avx512vnni") => Instructions::Avx512Vnni,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => Instructions::Avx512,
            #[cfg(target_arch = "x86_64")]
            Level::Amx(..) => Instructions::Amx,
        }
    }
}

/// A kernel, named after the instructions and the loop that it runs; [`kernel_for`] gives the file of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Rows of W are decoded to f32 and multiplied by dot products.
    DecodedRows,
    QuantizedScalar,
    QuantizedNeon,
    QuantizedNeonDotProduct,
    QuantizedAvx2,
    QuantizedAvxVnni,
    /// AVX-512 VNNI, one block of rows, x ordered by rows.
    Avx512ByRow,
    /// AVX-512 VNNI, one block of rows, x ordered by words.
    Avx512ByWord,
    /// AVX-512 VNNI, several blocks of rows: panels are unpacked once for all of them.
    Avx512ManyBlocks,
    /// AMX, one block of rows: each unit of a panel is unpacked just before its use.
    AmxOneBlock,
    /// AMX, several blocks of rows: panels are unpacked once for all of them.
    AmxManyBlocks,
    /// f32 multiply-adds with the vectors of the level, up to four rows at a time.
    FloatFourRows,
    /// f32 multiply-adds with AVX-512, one block of rows, eight at a time.
    FloatEightRows,
    /// f32 multiply-adds with AVX-512, several blocks: panels are converted to f32 once for all of them.
    FloatEightRowsManyBlocks,
    /// bf16 tiles of AMX, one block of rows.
    Bf16AmxOneBlock,
    /// bf16 tiles of AMX, several blocks of rows.
    Bf16AmxManyBlocks,
}

/// The form in which a kernel reads x.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InputForm {
    /// f32, as the rows lie in memory.
    Floats,
    /// 8-bit integers with scales: `quantized/activations/`.
    Quantized(InputOrder),
    /// f32, eight rows interleaved: `unquantized/interleaved_rows.rs`.
    Interleaved,
    /// bf16 in blocks of rows: `unquantized/amx_bf16.rs`.
    Bf16,
}

/// Returns the kernel that multiplies `num_rows` rows of x with a weight in `dtype`.
///
/// *Quantized* are Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, Q3_K, Q4_K, Q5_K and
/// Q6_K, *floats* are F32, F16 and BF16, *others* are all other formats. A line that names a format goes before one
/// that names its group. A block has 16 rows ([`BLOCK_ROWS`]). So one row of Q4_K on a machine with AMX is multiplied
/// by `Avx512ByRow`, by VNNI instructions: AMX begins with the fifth row.
///
/// | instructions     | format      | rows   | kernel                     | file                                    |
/// |------------------|-------------|--------|----------------------------|-----------------------------------------|
/// | any              | others      | 1..    | `DecodedRows`              | `decoded.rs`                            |
/// | `Scalar`         | quantized   | 1..    | `QuantizedScalar`          | `quantized/scalar.rs`                   |
/// | `Scalar`         | floats      | 1..    | `FloatFourRows`            | `unquantized/mod.rs`                    |
/// | `Neon`           | quantized   | 1..    | `QuantizedNeon`            | `quantized/neon.rs`                     |
/// | `Neon`           | floats      | 1..    | `FloatFourRows`            | `unquantized/mod.rs`                    |
/// | `NeonDotProduct` | quantized   | 1..    | `QuantizedNeonDotProduct`  | `quantized/neon.rs`                     |
/// | `NeonDotProduct` | floats      | 1..    | `FloatFourRows`            | `unquantized/mod.rs`                    |
/// | `Avx2`           | quantized   | 1..    | `QuantizedAvx2`            | `quantized/avx2.rs`                     |
/// | `Avx2`           | floats      | 1..    | `FloatFourRows`            | `unquantized/mod.rs`                    |
/// | `AvxVnni`        | quantized   | 1..    | `QuantizedAvxVnni`         | `quantized/avx2.rs`                     |
/// | `AvxVnni`        | floats      | 1..    | `FloatFourRows`            | `unquantized/mod.rs`                    |
/// | `Avx512`         | quantized   | 1..    | `QuantizedAvx2`            | `quantized/avx2.rs`                     |
/// | `Avx512`         | floats      | 1..5   | `FloatFourRows`            | `unquantized/mod.rs`                    |
/// | `Avx512`         | floats      | 5..17  | `FloatEightRows`           | `unquantized/eight_rows.rs`             |
/// | `Avx512`         | floats      | 17..   | `FloatEightRowsManyBlocks` | `unquantized/eight_rows.rs`             |
/// | `Avx512Vnni`     | quantized   | 1..5   | `Avx512ByRow`              | `quantized/avx512/one_block.rs`         |
/// | `Avx512Vnni`     | quantized   | 5..17  | `Avx512ByWord`             | `quantized/avx512/one_block.rs`         |
/// | `Avx512Vnni`     | quantized   | 17..   | `Avx512ManyBlocks`         | `quantized/avx512/many_blocks.rs`       |
/// | `Avx512Vnni`     | floats      | 1..5   | `FloatFourRows`            | `unquantized/mod.rs`                    |
/// | `Avx512Vnni`     | floats      | 5..17  | `FloatEightRows`           | `unquantized/eight_rows.rs`             |
/// | `Avx512Vnni`     | floats      | 17..   | `FloatEightRowsManyBlocks` | `unquantized/eight_rows.rs`             |
/// | `Amx` | Q3_K, IQ3_S, Q6_K | 1..9 | `Avx512ByRow` | `quantized/avx512/one_block.rs` |
/// | `Amx` | Q3_K, IQ3_S, Q6_K | 9..17 | `AmxOneBlock` | `quantized/amx/` (its `mod.rs` goes on) |
/// | `Amx`            | quantized   | 1..5   | `Avx512ByRow`              | `quantized/avx512/one_block.rs`         |
/// | `Amx`            | quantized   | 5..17  | `AmxOneBlock`              | `quantized/amx/` (its `mod.rs` goes on) |
/// | `Amx`            | quantized   | 17..   | `AmxManyBlocks`            | `quantized/amx/` (its `mod.rs` goes on) |
/// | `Amx`            | BF16        | 1..17  | `Bf16AmxOneBlock`          | `unquantized/amx_bf16.rs`               |
/// | `Amx`            | BF16        | 17..   | `Bf16AmxManyBlocks`        | `unquantized/amx_bf16.rs`               |
/// | `Amx`            | floats      | 1..5   | `FloatFourRows`            | `unquantized/mod.rs`                    |
/// | `Amx`            | floats      | 5..17  | `FloatEightRows`           | `unquantized/eight_rows.rs`             |
/// | `Amx`            | floats      | 17..   | `FloatEightRowsManyBlocks` | `unquantized/eight_rows.rs`             |
pub(super) fn kernel_for(dtype: DType, num_rows: usize, instructions: Instructions) -> Kernel {
    use Instructions::{Amx, Avx2, Avx512, Avx512Vnni, AvxVnni, Neon, NeonDotProduct, Scalar};
    let is_one_block = num_rows <= BLOCK_ROWS;
    if let Some(layout) = with_quantized_format!(dtype, F => F::LAYOUT) {
        return match instructions {
            Scalar => Kernel::QuantizedScalar,
            Neon => Kernel::QuantizedNeon,
            NeonDotProduct => Kernel::QuantizedNeonDotProduct,
            Avx2 | Avx512 => Kernel::QuantizedAvx2,
            AvxVnni => Kernel::QuantizedAvxVnni,
            Avx512Vnni if num_rows < MIN_ROWS_BY_WORD => Kernel::Avx512ByRow,
            Avx512Vnni if is_one_block => Kernel::Avx512ByWord,
            Avx512Vnni => Kernel::Avx512ManyBlocks,
            Amx if num_rows < min_rows_amx(&layout) => Kernel::Avx512ByRow,
            Amx if is_one_block => Kernel::AmxOneBlock,
            Amx => Kernel::AmxManyBlocks,
        };
    }
    match (dtype, instructions) {
        (DType::BF16, Amx) if is_one_block => Kernel::Bf16AmxOneBlock,
        (DType::BF16, Amx) => Kernel::Bf16AmxManyBlocks,
        (DType::F32 | DType::F16 | DType::BF16, Avx512 | Avx512Vnni | Amx) => match num_rows {
            ..MIN_ROWS_INTERLEAVED => Kernel::FloatFourRows,
            _ if is_one_block => Kernel::FloatEightRows,
            _ => Kernel::FloatEightRowsManyBlocks,
        },
        (DType::F32 | DType::F16 | DType::BF16, _) => Kernel::FloatFourRows,
        _ => Kernel::DecodedRows,
    }
}

impl Kernel {
    /// The form in which the kernel reads x. Kernels that share quantized rows agree on their order.
    pub(super) fn input_form(self) -> InputForm {
        match self {
            Kernel::DecodedRows | Kernel::FloatFourRows => InputForm::Floats,
            Kernel::QuantizedScalar
            | Kernel::QuantizedNeon
            | Kernel::QuantizedNeonDotProduct
            | Kernel::QuantizedAvx2
            | Kernel::QuantizedAvxVnni
            | Kernel::Avx512ByRow
            | Kernel::AmxOneBlock
            | Kernel::AmxManyBlocks => InputForm::Quantized(InputOrder::ByRow),
            Kernel::Avx512ByWord | Kernel::Avx512ManyBlocks => InputForm::Quantized(InputOrder::ByWord),
            Kernel::FloatEightRows | Kernel::FloatEightRowsManyBlocks => InputForm::Interleaved,
            Kernel::Bf16AmxOneBlock | Kernel::Bf16AmxManyBlocks => InputForm::Bf16,
        }
    }

    /// Whether a gated pair of products (`activation(gate) * up`) is computed as one: where arithmetic takes longer
    /// than reading weights, the results of both are combined while they are in the cache.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn fuses_gate(self, num_rows: usize) -> bool {
        match self {
            Kernel::AmxOneBlock
            | Kernel::AmxManyBlocks
            | Kernel::Avx512ManyBlocks
            | Kernel::FloatEightRowsManyBlocks
            | Kernel::Bf16AmxManyBlocks => true,
            Kernel::Bf16AmxOneBlock => num_rows >= MIN_ROWS_BF16_GATED,
            _ => false,
        }
    }
}

// The table involves no unsafe code, and Miri would take minutes for it.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    const INSTRUCTIONS: [Instructions; 8] = [
        Instructions::Scalar,
        Instructions::Neon,
        Instructions::NeonDotProduct,
        Instructions::Avx2,
        Instructions::AvxVnni,
        Instructions::Avx512,
        Instructions::Avx512Vnni,
        Instructions::Amx,
    ];

    /// A line of the table in the documentation of [`kernel_for`].
    struct Line {
        instructions: String,
        format: String,
        rows: std::ops::Range<usize>,
        kernel: String,
        file: String,
    }

    fn table() -> Vec<Line> {
        let lines = include_str!("kernel.rs").lines().filter_map(|line| line.strip_prefix("/// | ")).skip(1);
        lines
            .map(|line| {
                let cells: Vec<String> = line.split('|').map(|cell| cell.trim().replace('`', "")).collect();
                let (start, end) = cells[2].split_once("..").expect("a range of rows");
                Line {
                    instructions: cells[0].clone(),
                    format: cells[1].clone(),
                    rows: start.parse().expect("a number")..end.parse().unwrap_or(usize::MAX),
                    kernel: cells[3].clone(),
                    file: cells[4].split(' ').next().expect("a path").to_string(),
                }
            })
            .collect()
    }

    fn group(dtype: DType) -> &'static str {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => "floats",
            _ if with_quantized_format!(dtype, F => F::LAYOUT).is_some() => "quantized",
            _ => "others",
        }
    }

    #[test]
    fn the_documented_table_is_what_the_function_returns() {
        let table = table();
        let mut is_used = vec![false; table.len()];
        for instructions in INSTRUCTIONS {
            for dtype in DType::ALL {
                for num_rows in 1..40 {
                    let applies = |line: &Line, format: &str| {
                        (line.instructions == "any" || line.instructions == format!("{instructions:?}"))
                            && line.format.split(", ").any(|of_line| of_line == format)
                            && line.rows.contains(&num_rows)
                    };
                    let find = |format: &str| table.iter().position(|line| applies(line, format));
                    let what = format!("{dtype}, {num_rows} rows, {instructions:?}");
                    let index = find(dtype.name()).or_else(|| find(group(dtype))).expect(&what);
                    let kernel = kernel_for(dtype, num_rows, instructions);
                    assert_eq!(format!("{kernel:?}"), table[index].kernel, "{what}");
                    is_used[index] = true;
                }
            }
        }
        assert!(is_used.iter().all(|&used| used), "every line of the table applies to something");
    }

    #[test]
    fn every_file_of_the_table_exists() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/matmul");
        for line in table() {
            assert!(folder.join(&line.file).exists(), "{} of {}", line.file, line.kernel);
        }
    }

    #[test]
    fn one_row_of_q4_k_on_amx_is_multiplied_by_vnni() {
        assert_eq!(kernel_for(DType::Q4_K, 1, Instructions::Amx), Kernel::Avx512ByRow);
        assert_eq!(kernel_for(DType::Q4_K, 5, Instructions::Amx), Kernel::AmxOneBlock);
    }

    #[test]
    fn quantized_formats_agree_on_the_order_of_x() {
        for instructions in INSTRUCTIONS {
            for num_rows in 1..40 {
                let forms: Vec<InputForm> = DType::ALL
                    .into_iter()
                    .filter(|&dtype| group(dtype) == "quantized")
                    .map(|dtype| kernel_for(dtype, num_rows, instructions).input_form())
                    .collect();
                assert!(forms.iter().all(|form| *form == forms[0]), "{num_rows} rows, {instructions:?}: {forms:?}");
            }
        }
    }
}
