//! Random activations and weights for the suites, equal on every machine.

use pellucid_tensor::{DType, HostWeight, quant};

/// A deterministic source of test data; the number is its seed.
#[derive(Debug)]
pub struct RandomData(pub u64);

impl RandomData {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`, which is above 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Returns a roughly normal number: the sum of four uniform numbers, scaled to unit variance.
    fn normal(&mut self) -> f32 {
        let sum: f64 = (0..4).map(|_| self.next() as f64 / u64::MAX as f64 - 0.5).sum();
        (sum * 3f64.sqrt()) as f32
    }

    /// Returns `len` roughly normal numbers.
    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// Returns a weight in any format, and its decoded values, which are finite and of similar size.
    pub fn weight(&mut self, dtype: DType, rows: usize, cols: usize) -> (HostWeight, Vec<f32>) {
        self.weight_scaled(dtype, rows, cols, MODEST)
    }

    /// Like [`RandomData::weight`], with block scales of a given size.
    pub(super) fn weight_scaled(
        &mut self,
        dtype: DType,
        rows: usize,
        cols: usize,
        scales: ScaleBits,
    ) -> (HostWeight, Vec<f32>) {
        let bytes: Vec<u8> = match dtype {
            DType::F32 => self.normals(rows * cols).iter().flat_map(|value| value.to_le_bytes()).collect(),
            DType::BF16 => {
                (0..rows * cols).flat_map(|_| ((self.normal().to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
            // Any sign, an exponent of 2^-3 to 1, any mantissa.
            DType::F16 => (0..rows * cols)
                .flat_map(|_| {
                    let bits = self.next() as u16;
                    ((bits & 0x83FF) | (12 + (bits >> 13) % 4) << 10).to_le_bytes()
                })
                .collect(),
            _ => {
                let len = dtype.bytes_for(rows * cols).expect("whole blocks");
                let mut bytes: Vec<u8> = (0..len).map(|_| self.next() as u8).collect();
                tame_scales(dtype, &mut bytes, scales);
                bytes
            }
        };
        let mut decoded = vec![0.0; rows * cols];
        quant::decode(dtype, &bytes, &mut decoded);
        assert!(decoded.iter().all(|value| value.is_finite()), "{dtype}: test weights are finite");
        (HostWeight { dtype, rows, cols, bytes: bytes.into() }, decoded)
    }
}

/// The common bits of all f16 scales, in the upper byte.
pub(super) type ScaleBits = u8;

/// Scales of 2^-8 to 2^-7, as a quantizer would choose them.
pub(super) const MODEST: ScaleBits = 0x1c;
/// Scales of 4 to 8: larger than in any model.
pub(super) const LARGE: ScaleBits = 0x44;

/// Sets the exponents of the f16 scales of each block; the rest of the block may be any bytes.
fn tame_scales(dtype: DType, bytes: &mut [u8], scales: ScaleBits) {
    let scale_offsets: &[usize] = match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL | DType::IQ4_XS => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        DType::IQ1_S | DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => &[0],
        DType::TQ1_0 => &[52],
        DType::TQ2_0 => &[64],
        // Their scales are bytes, or divided among bytes, and set below.
        DType::MXFP4 | DType::NVFP4 | DType::IQ1_M | DType::F8_E4M3 => &[],
        DType::F32 | DType::F16 | DType::BF16 => unreachable!("unquantized formats have no scales"),
    };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for &offset in scale_offsets {
            block[offset + 1] = scales | (block[offset + 1] & 0x83);
        }
        match dtype {
            DType::MXFP4 => block[0] = if scales == LARGE { 138 } else { 122 } + block[0] % 4,
            // An exponent of four bits with bias 7, above three bits of mantissa.
            DType::NVFP4 => {
                let exponent = if scales == LARGE { 12 } else { 2 };
                block[..4].iter_mut().for_each(|scale| *scale = exponent << 3 | *scale & 7);
            }
            // An f32 with the exponent of the f16, of which values have seven bits more; NaN is no weight.
            DType::F8_E4M3 => {
                let scale = f32::from_bits((u32::from(scales >> 2 & 0x1f) + 112 - 5) << 23);
                block[..4].copy_from_slice(&scale.to_le_bytes());
                block[4..].iter_mut().filter(|byte| **byte & 0x7f == 0x7f).for_each(|byte| *byte &= 0xfe);
            }
            // The upper byte of the scale is in two halves of bytes.
            DType::IQ1_M => {
                block[53] = block[53] & 0x3f | (scales & 0x0c) << 4;
                block[55] = block[55] & 0x8f | scales & 0x70;
            }
            _ => {}
        }
    }
}
