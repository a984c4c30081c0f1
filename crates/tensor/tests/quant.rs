//! Every block format against the values of the reference dequantizer, bit for bit. They are made by
//! `fixtures/make_quant_fixtures.py`.

use std::path::Path;

use pellucid_tensor::{DType, quant};

fn fixture(dtype: DType, kind: &str) -> Vec<u8> {
    let name = format!("fixtures/quant/{}.{kind}", dtype.name().to_lowercase());
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn values(dtype: DType) -> Vec<f32> {
    fixture(dtype, "values").as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[test]
fn every_format_agrees_with_the_reference_to_the_bit() {
    for dtype in DType::ALL {
        let blocks = fixture(dtype, "blocks");
        let expected = values(dtype);
        assert!(expected.len() >= 8 * dtype.block_len(), "{dtype}: the fixture has eight blocks or more");
        let mut found = vec![f32::NAN; expected.len()];
        quant::decode(dtype, &blocks, &mut found);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.to_bits(), expected.to_bits(), "{dtype}, number {index}: {found} is not {expected}");
        }
    }
}

/// Blocks are independent: decoding one alone gives what decoding all gave.
#[test]
fn a_block_decodes_alone_as_it_does_in_a_row() {
    for dtype in DType::ALL {
        let (blocks, expected) = (fixture(dtype, "blocks"), values(dtype));
        let (len, bytes) = (dtype.block_len(), dtype.block_bytes());
        for index in 0..expected.len() / len {
            let mut found = vec![0.0; len];
            quant::decode(dtype, &blocks[index * bytes..(index + 1) * bytes], &mut found);
            let same = found.iter().zip(&expected[index * len..]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{dtype}, block {index}");
        }
    }
}

/// Encoding what was decoded gives values within half a step, and exactly the same ones for the unquantized formats.
#[test]
fn what_was_encoded_decodes_to_the_nearest() {
    let x: Vec<f32> = (0..256).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.137 * (1 + i / 32) as f32).collect();
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0] {
        let mut bytes = vec![0; dtype.bytes_for(x.len()).expect("whole blocks")];
        quant::encode(dtype, &x, &mut bytes);
        let mut found = vec![0.0; x.len()];
        quant::decode(dtype, &bytes, &mut found);
        for (block, (found, x)) in found.chunks(32).zip(x.chunks(32)).enumerate() {
            let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            for (found, x) in found.iter().zip(x) {
                let bound = match dtype {
                    DType::F32 => 0.0,
                    DType::F16 => x.abs() * 2f32.powi(-11),
                    DType::BF16 => x.abs() * 2f32.powi(-8),
                    // Half a step of largest / 127, and the rounding of the scale to f16.
                    _ => largest / 254.0 + x.abs() * 2f32.powi(-11),
                };
                assert!((found - x).abs() <= bound * 1.0001, "{dtype}, block {block}: {x} became {found}");
            }
        }
    }
}

/// Roughly normally distributed values, as weights are.
fn normals(len: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| (0..12).map(|_| uniform()).sum()).collect()
}

fn recoded(dtype: DType, x: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0; dtype.bytes_for(x.len()).expect("whole blocks")];
    quant::encode(dtype, x, &mut bytes);
    let mut found = vec![0.0; x.len()];
    quant::decode(dtype, &bytes, &mut found);
    found
}

/// The error of each encoder on normally distributed values, relative to their magnitude, is in the range that the
/// format allows; a smaller one would mean that the comparison is broken. The ranges contain the error of llama.cpp's
/// quantizer on the same values.
#[test]
fn encoders_leave_the_error_that_their_format_allows() {
    let x = normals(64 * 256);
    for (dtype, range) in [
        (DType::Q4_0, 0.08..0.10),
        (DType::Q4_1, 0.06..0.08),
        (DType::Q5_0, 0.04..0.05),
        (DType::Q5_1, 0.03..0.04),
        (DType::Q8_0, 0.004..0.006),
        (DType::Q4_K, 0.06..0.075),
        (DType::Q5_K, 0.03..0.038),
        (DType::Q6_K, 0.014..0.02),
    ] {
        let found = recoded(dtype, &x);
        let (error, size) = (x.iter().zip(&found))
            .fold((0.0, 0.0), |(error, size), (x, y)| (error + (x - y).powi(2), size + x.powi(2)));
        let relative = (error / size).sqrt();
        eprintln!("{dtype}: {relative:.4}");
        assert!(range.contains(&relative), "{dtype}: an error of {relative}, expected {range:?}");
    }
}

/// Zeros, one value among zeros, all equal, all negative, very small and large: nothing is lost beyond the format's
/// step.
#[test]
fn encoders_take_odd_blocks() {
    let mut lonely = vec![0.0; 256];
    lonely[77] = -3.5;
    let cases =
        [vec![0.0; 256], lonely, vec![1.25; 256], vec![-0.5; 256], vec![1e-30; 256], vec![3e4; 256], normals(256)];
    for dtype in DType::ALL.into_iter().filter(|&dtype| quant::has_encoder(dtype)) {
        for x in &cases {
            let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            for (x, found) in x.iter().zip(recoded(dtype, x)) {
                // Four bits: half of a fifteenth of the range, which may be twice the largest value; scales are rounded
                // too.
                let bound = largest * 0.14 + 1e-7;
                assert!((x - found).abs() <= bound, "{dtype}: {x} became {found} in a block up to {largest}");
            }
        }
    }
}

/// Every format accepts an empty tensor, and refuses one empty argument with one that is not: values that were never
/// written would pass for decoded ones.
#[test]
fn only_no_bytes_decode_to_no_values() {
    for dtype in DType::ALL {
        let decodes = |num_bytes: usize, num_values: usize| {
            std::panic::catch_unwind(|| quant::decode(dtype, &vec![0; num_bytes], &mut vec![f32::NAN; num_values]))
                .is_ok()
        };
        let (block_bytes, block_len) = (dtype.block_bytes(), dtype.block_len());
        assert!(decodes(0, 0), "{dtype}: no bytes are no values");
        assert!(decodes(block_bytes, block_len), "{dtype}: one block");
        assert!(!decodes(0, block_len), "{dtype}: no bytes for one block of values");
        assert!(!decodes(block_bytes, 0), "{dtype}: one block of bytes for no values");
    }
}

#[test]
fn lengths_that_do_not_fit_panic_with_both_lengths() {
    for (bytes, numbers) in [(18, 31), (18, 64), (17, 32), (19, 32), (36, 32)] {
        let panic = std::panic::catch_unwind(|| quant::decode(DType::Q4_0, &vec![0; bytes], &mut vec![0.0; numbers]))
            .expect_err("lengths that do not fit");
        let message = panic.downcast_ref::<String>().expect("a formatted message");
        assert_eq!(*message, format!("{bytes} bytes of Q4_0 do not decode to {numbers} numbers"));
    }
}
