//! Random weights of any format, for benchmarks: the bytes are random and the scales are in the usual range, so that a
//! model made of them computes with ordinary values. All zeros or NaN could change the speed.

use super::f32_to_f16;
use crate::DType;

/// Fills whole blocks with weights of about `1 / sqrt(fan_in)`, the scale at which a layer keeps the magnitude of its
/// input.
///
/// Panics unless `out` is whole blocks. The same seed gives the same bytes.
pub fn fill_random(dtype: DType, fan_in: usize, seed: u64, out: &mut [u8]) {
    assert!(out.len().is_multiple_of(dtype.block_bytes()), "{} bytes are no whole blocks of {dtype}", out.len());
    let mut state = seed;
    // splitmix64: one multiplication-heavy round for eight bytes.
    let mut next = move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    };
    let scale = 1.0 / (fan_in as f32).sqrt();
    match dtype {
        DType::F32 => floats(&mut next, scale, 4, out, |x| x.to_bits()),
        DType::BF16 => floats(&mut next, scale, 2, out, |x| x.to_bits() >> 16),
        DType::F16 => floats(&mut next, scale, 2, out, |x| u32::from(f32_to_f16(x))),
        _ => {
            for chunk in out.chunks_mut(8) {
                chunk.copy_from_slice(&next().to_le_bytes()[..chunk.len()]);
            }
            for block in out.chunks_exact_mut(dtype.block_bytes()) {
                set_scales(dtype, scale, block);
            }
        }
    }
}

/// Fills with uniform values in (-scale, scale) of up to 24 random bits each.
fn floats(next: &mut impl FnMut() -> u64, scale: f32, width: usize, out: &mut [u8], bits: impl Fn(f32) -> u32) {
    for number in out.chunks_exact_mut(width) {
        let uniform = (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        number.copy_from_slice(&bits(uniform * scale).to_le_bytes()[..width]);
    }
}

/// Overwrites the scales (and minimums) of one block, so that its values are of the order of `scale`.
fn set_scales(dtype: DType, scale: f32, block: &mut [u8]) {
    let mut put =
        |offset: usize, value: f32| block[offset..offset + 2].copy_from_slice(&f32_to_f16(value).to_le_bytes());
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => unreachable!("plain formats have no scales"),
        DType::Q4_0 => put(0, scale / 8.0),
        DType::Q5_0 => put(0, scale / 16.0),
        DType::Q4_1 => (put(0, scale / 8.0), put(2, -scale)).1,
        DType::Q5_1 => (put(0, scale / 16.0), put(2, -scale)).1,
        DType::Q8_0 | DType::IQ4_NL => put(0, scale / 127.0),
        // Sub-block scales are 4 or 6 bits of noise: about half their range on average.
        DType::Q2_K => (put(80, scale / 24.0), put(82, scale / 8.0)).1,
        DType::Q3_K => put(108, scale / 96.0),
        DType::Q4_K => (put(0, scale / 256.0), put(2, scale / 32.0)).1,
        DType::Q5_K => (put(0, scale / 512.0), put(2, scale / 32.0)).1,
        DType::Q6_K => put(208, scale / 4096.0),
        DType::IQ4_XS => put(0, scale / 2048.0),
        // An exponent of two with bias 127; the values reach 6.
        DType::MXFP4 => block[0] = (127.0 + (scale / 6.0).log2().round()) as u8,
        // Four exponents of two with bias 7, of which a power of two is the usual scale.
        DType::NVFP4 => block[..4].fill(((7.0 + (scale / 6.0).log2().round()).max(1.0) as u8) << 3),
        // Levels of -1 to 1, times odd numbers up to 15.
        DType::IQ1_S => put(0, scale / 8.0),
        DType::IQ1_M => {
            let d = f32_to_f16(scale / 8.0);
            for i in 0..4 {
                let high = &mut block[49 + 2 * i];
                *high = *high & 0x0f | ((d >> (4 * i) & 0x0f) as u8) << 4;
            }
        }
        // Levels of 8 to 43, times up to 4.
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => put(0, scale / 64.0),
        // Levels of 4 to 62, times up to 8.
        DType::IQ3_XXS => put(0, scale / 128.0),
        // Levels of 1 to 15, times odd numbers up to 31.
        DType::IQ3_S => put(0, scale / 128.0),
        DType::F8_E4M3 => {
            // The two NaNs become the largest numbers. Random exponents give values of about 60.
            block[4..].iter_mut().filter(|byte| **byte & 0x7f == 0x7f).for_each(|byte| *byte &= 0xfe);
            block[..4].copy_from_slice(&(scale / 128.0).to_le_bytes());
        }
        DType::TQ1_0 => put(52, scale),
        DType::TQ2_0 => put(64, scale),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant;

    #[test]
    fn every_format_gets_finite_weights_of_about_the_right_size() {
        let fan_in = 1024;
        for dtype in DType::ALL {
            let mut bytes = vec![0; dtype.bytes_for(1 << 16).expect("whole blocks")];
            fill_random(dtype, fan_in, 7, &mut bytes);
            let mut numbers = vec![0.0f32; 1 << 16];
            quant::decode(dtype, &bytes, &mut numbers);
            assert!(numbers.iter().all(|x| x.is_finite()), "{dtype}");
            let mean_square = numbers.iter().map(|x| f64::from(x * x)).sum::<f64>() / numbers.len() as f64;
            let ratio = mean_square.sqrt() * f64::from(fan_in as f32).sqrt();
            assert!((0.2..3.0).contains(&ratio), "{dtype}: {ratio} of the wanted size");
            let mut again = vec![0; bytes.len()];
            fill_random(dtype, fan_in, 7, &mut again);
            assert_eq!(bytes, again, "{dtype}");
        }
    }
}
