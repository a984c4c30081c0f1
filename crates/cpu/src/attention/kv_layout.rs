//! The layout of keys and values in the blocks of KV memory, and how rows are written there.
//!
//! A block has one contiguous region of `block_len * head_size` values for each kv head. Keys are transposed, so that a
//! vector holds one value of sixteen positions and computes sixteen scores; values are not.
//!
//! ```text
//! keys    F32, F16, BF16   [head_size][block_len]
//!         Q8_0             [head_size / 32][block_len] scales as f16, then [head_size][block_len] signed bytes
//! values  F32, F16, BF16   [block_len][head_size]
//!         Q8_0             [block_len][head_size / 32] scales as f16, then [block_len][head_size] signed bytes
//! ```
//! With AMX, F16 and BF16 are stored as tiles multiply them: a tile instruction multiplies pairs, here two values that
//! are sixteen apart in the head (or in position). A line of 64 bytes holds the pairs of sixteen positions (or of
//! sixteen values of the head).
//!
//! ```text
//! keys    [head_size / 32][16][block_len / 16][2][16 positions]   value 32 i + 16 k + j is at [i][j][..][k]
//! values  [block_len / 32][16][head_size / 16][2][16 values]      position 32 i + 16 k + j is at [i][j][..][k]
//! ```
//! Values are encoded as in the format, in another order than in a file. Each head is rounded separately.
//!
//! With latent attention, values are parts of the keys: nothing but keys is stored, in the layout without tiles.

use pellucid_tensor::{DType, HeadShape, KvLayer, quant};

use super::new_rows::KeyOrValue;
use crate::memory::{bytes, bytes_mut};
use crate::shared_slice::SharedSlice;
use crate::simd::{Isa, Level, vectorized};

/// Values that share a scale in Q8_0.
pub(super) const GROUP: usize = DType::Q8_0.block_len();

/// Values that a tile instruction of AMX sums: `head_size` and `block_len` must be multiples of it.
pub(super) const STEP: usize = 32;

/// The format and shape of KV memory, which give the offsets of keys and values.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvLayout {
    pub(super) dtype: DType,
    pub(super) shape: HeadShape,
    /// Whether values are stored as the tiles of AMX multiply them.
    pub(super) tiles: bool,
    /// Index of the first value in a key, if values are parts of the keys.
    pub(super) first_value: Option<usize>,
}

impl KvLayout {
    pub(super) fn new(level: Level, dtype: DType, shape: HeadShape) -> Self {
        let whole = shape.head_size.is_multiple_of(STEP) && shape.block_len.is_multiple_of(STEP);
        let tiles = level.isa() == Isa::Amx && matches!(dtype, DType::F16 | DType::BF16) && whole;
        KvLayout { dtype, shape, tiles, first_value: None }
    }

    /// Returns the layout for values that are the values of each key from index `first` on.
    pub(super) fn with_values_in_keys(self, first: usize) -> Self {
        assert!(first < self.shape.head_size);
        KvLayout { tiles: false, first_value: Some(first), ..self }
    }

    /// Number of values that attention sums for a head.
    #[inline(always)]
    pub(super) fn value_size(&self) -> usize {
        self.shape.head_size - self.first_value.unwrap_or(0)
    }

    /// Bytes of one key or value of one head.
    #[inline(always)]
    pub(super) fn head_bytes(&self) -> usize {
        self.shape.head_size / self.dtype.block_len() * self.dtype.block_bytes()
    }

    /// Bytes of one head's keys (or values) in a block.
    #[inline(always)]
    pub(super) fn region_bytes(&self) -> usize {
        self.shape.block_len * self.head_bytes()
    }

    /// Offset of a region in bytes.
    #[inline(always)]
    pub(super) fn region(&self, block: usize, kv_head: usize) -> usize {
        (block * self.shape.num_kv_heads + kv_head) * self.region_bytes()
    }

    /// Offset of the signed bytes of Q8_0 in a region: they follow the scales.
    #[inline(always)]
    pub(super) fn quants(&self) -> usize {
        self.shape.head_size / GROUP * self.shape.block_len * 2
    }

    /// Writes an encoded key or value in the layout for tiles, sixteen 16-bit values at a time: those of a value row
    /// are adjacent, those of a key are not.
    fn place_in_tiles(&self, head: &[u8], offset: usize, kind: KeyOrValue, region: &mut [u8]) {
        let HeadShape { block_len, head_size, .. } = self.shape;
        let values = region.as_chunks_mut::<2>().0;
        for (part, sixteen) in head.as_chunks::<32>().0.iter().enumerate() {
            let sixteen = sixteen.as_chunks::<2>().0;
            if kind == KeyOrValue::Key {
                let lines = block_len / 16;
                let first = (part / 2 * 16 * lines + offset / 16) * 32 + part % 2 * 16 + offset % 16;
                for (value, slot) in sixteen.iter().zip(values[first..].iter_mut().step_by(32 * lines)) {
                    *slot = *value;
                }
            } else {
                let pair = offset / 32 * 16 + offset % 16;
                let first = (pair * (head_size / 16) + part) * 32 + offset / 16 % 2 * 16;
                values[first..][..16].copy_from_slice(sixteen);
            }
        }
    }

    /// Writes an encoded key or value to its region.
    pub(super) fn place(&self, head: &[u8], offset: usize, kind: KeyOrValue, region: &mut [u8]) {
        let HeadShape { block_len, head_size, .. } = self.shape;
        let is_key = kind == KeyOrValue::Key;
        // Index of the i-th of the n elements of a position.
        let index = |i: usize, n: usize| if is_key { i * block_len + offset } else { offset * n + i };
        if self.tiles {
            self.place_in_tiles(head, offset, kind, region);
        } else if self.dtype == DType::Q8_0 {
            for (group, block) in head.chunks_exact(DType::Q8_0.block_bytes()).enumerate() {
                let scale = index(group, head_size / GROUP) * 2;
                region[scale..scale + 2].copy_from_slice(&block[..2]);
                for (i, &quant) in block[2..].iter().enumerate() {
                    region[self.quants() + index(group * GROUP + i, head_size)] = quant;
                }
            }
        } else if is_key {
            let size = self.dtype.block_bytes();
            for (d, value) in head.chunks_exact(size).enumerate() {
                region[index(d, head_size) * size..][..size].copy_from_slice(value);
            }
        } else {
            region[offset * head.len()..][..head.len()].copy_from_slice(head);
        }
    }
}

vectorized! {
    /// Encodes one head. A value that the format cannot represent becomes NaN instead of infinity: an infinite key
    /// could get a weight of zero and go unnoticed, but a NaN reaches the logits of every row that sees it.
    pub(super) fn encode_head<S: Simd>(dtype: DType, head: &[f32], out: &mut [u8]) {
        const NAN: [u8; 2] = 0x7e00u16.to_le_bytes();
        #[cfg(target_arch = "x86_64")]
        if S::ISA == Isa::Avx512 && dtype == DType::F16 {
            // SAFETY: a value of S proves that the instructions are there.
            return unsafe { halves(head, out) };
        }
        quant::encode(dtype, head, out);
        match dtype {
            DType::F16 | DType::BF16 => {
                let infinity: u16 = if dtype == DType::F16 { 0x7c00 } else { 0x7f80 };
                for half in out.as_chunks_mut().0 {
                    let bits = u16::from_le_bytes(*half);
                    // One more bit set makes an infinity a NaN.
                    let nan = u16::from(bits & 0x7fff == infinity);
                    *half = (bits | nan).to_le_bytes();
                }
            }
            // The scale is infinite if the largest value is; it is finite but wrong if a value is NaN, which `max`
            // ignores.
            DType::Q8_0 => {
                for (x, block) in head.chunks_exact(GROUP).zip(out.chunks_exact_mut(DType::Q8_0.block_bytes())) {
                    let finite = quant::f16_to_f32(u16::from_le_bytes([block[0], block[1]])).is_finite();
                    if !finite || x.iter().any(|x| x.is_nan()) {
                        block[..2].copy_from_slice(&NAN);
                    }
                }
            }
            _ => {}
        }
    }
}

/// Encodes F16 with the conversion instruction, sixteen values at a time; gives the same bits as `quant::encode`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,f16c")]
fn halves(head: &[f32], out: &mut [u8]) {
    use std::arch::x86_64::*;
    assert_eq!(out.len(), 2 * head.len(), "two bytes for each value");
    for (x, out) in head.chunks(16).zip(out.chunks_mut(32)) {
        let lanes = ((1u32 << x.len()) - 1) as u16;
        // SAFETY: the mask excludes lanes beyond the end of both slices.
        unsafe {
            let x = _mm512_maskz_loadu_ps(lanes, x.as_ptr());
            let bits = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff));
            let infinite = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7c00));
            let bits = _mm256_mask_add_epi16(bits, infinite, bits, _mm256_set1_epi16(1));
            _mm256_mask_storeu_epi16(out.as_mut_ptr().cast(), lanes, bits);
        }
    }
}

/// The bytes of a layer's blocks. Any number of tasks read them; a task writes only regions that no other task reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvBytes<'a> {
    pub(super) keys: SharedSlice<'a, u8>,
    pub(super) values: SharedSlice<'a, u8>,
}

impl<'a> KvBytes<'a> {
    pub(super) fn of(kv: &'a mut KvLayer) -> Self {
        KvBytes { keys: SharedSlice::new(bytes_mut(&mut kv.keys)), values: SharedSlice::new(bytes_mut(&mut kv.values)) }
    }

    pub(super) fn read_only(kv: &'a KvLayer) -> Self {
        KvBytes { keys: SharedSlice::read_only(bytes(&kv.keys)), values: SharedSlice::read_only(bytes(&kv.values)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Scalar;

    fn decoded(dtype: DType, head: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; dtype.bytes_for(head.len()).expect("whole blocks")];
        encode_head(Scalar, dtype, head, &mut bytes);
        #[cfg(target_arch = "x86_64")]
        if let Some(simd) = crate::simd::Avx512::detect() {
            let mut fast = vec![0; bytes.len()];
            encode_head(simd, dtype, head, &mut fast);
            assert_eq!(bytes, fast, "{dtype}: {head:?}");
        }
        let mut values = vec![0.0; head.len()];
        quant::decode(dtype, &bytes, &mut values);
        values
    }

    /// Values that cannot be represented become NaN; values in other blocks do not change.
    #[test]
    fn values_beyond_the_format_become_nan() {
        for bad in [70_000.0, -1e30, f32::INFINITY, f32::NAN] {
            let mut head = [0.5f32; 64];
            head[7] = bad;
            let half = decoded(DType::F16, &head);
            assert!(half[7].is_nan() && half[6] == 0.5 && half[63] == 0.5, "{bad}");
            assert_eq!(decoded(DType::BF16, &head)[7].is_nan(), !bad.is_finite(), "{bad}");
            assert_eq!(decoded(DType::F32, &head)[7].to_bits(), bad.to_bits());
            let eight = decoded(DType::Q8_0, &head);
            // 70,000 / 127 is a valid scale; the others are not.
            assert!(bad == 70_000.0 || eight[..32].iter().all(|x| x.is_nan()), "{bad}: {eight:?}");
            assert!(eight[32..].iter().all(|x| (x - 0.5).abs() < 0.003), "{bad}");
        }
        assert_eq!(decoded(DType::F16, &[65_504.0, -65_504.0]), [65_504.0, -65_504.0]);
        // Ties, and values below the smallest normal and the smallest denormal one; `decoded` compares both encoders.
        let small: Vec<f32> = (0..200).map(|i| (i as f32 - 100.0) * 1.3e-8 * (1 << (i % 19)) as f32).collect();
        decoded(DType::F16, &small);
        decoded(DType::F16, &[1.0 + 2f32.powi(-11), 1.0 + 3.0 * 2f32.powi(-11), 65_519.9, 65_520.0]);
    }
}
