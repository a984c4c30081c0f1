//! Every block format against the values of the reference dequantizer, bit for bit. `fixtures/make_quant_fixtures.py` made them.

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

/// Encoding what was decoded gives numbers within half a step, and exactly the same for the plain formats.
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

#[test]
fn nothing_decodes_to_nothing() {
    for dtype in DType::ALL {
        quant::decode(dtype, &[], &mut []);
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
