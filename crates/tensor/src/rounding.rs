//! [`RoundedGroups`]: rows as products with quantized weights round them.

/// How a product rounds its input rows: each group of adjacent values becomes 8-bit integers with one scale.
///
/// With `largest` the greatest magnitude of a group, `scale = largest / 127` and `q = round(x * (127 / largest))`, to
/// nearest with ties to even. [`RoundedGroups::encode`] stores `largest` and the integers, in about a fourth of the
/// bytes of the values. [`RoundedGroups::decode`] returns values of which the product makes the same integers and the
/// same scales, to the bit. A group with a value that is not finite gives products that are not finite either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundedGroups {
    /// Values of a group.
    pub len: usize,
}

/// 1.5 * 2^23: the lowest byte of `x + ROUND` is the nearest integer of -128 to 127.
const ROUND: f32 = 12_582_912.0;
/// Bytes of `largest`.
const HEAD: usize = size_of::<f32>();

impl RoundedGroups {
    /// Returns the bytes of `num_values` values, which are whole groups.
    pub fn encoded_len(self, num_values: usize) -> usize {
        num_values / self.len * (HEAD + self.len)
    }

    /// Writes whole groups to `bytes`.
    pub fn encode(self, values: &[f32], bytes: &mut [u8]) {
        assert_eq!((bytes.len(), values.len() % self.len), (self.encoded_len(values.len()), 0), "whole groups");
        for (values, bytes) in values.chunks_exact(self.len).zip(bytes.chunks_exact_mut(HEAD + self.len)) {
            let (head, integers) = bytes.split_at_mut(HEAD);
            // Magnitudes are ordered like their bits, with NaN last.
            let largest = values.iter().fold(0, |largest, x| (x.to_bits() & 0x7fff_ffff).max(largest));
            let largest = f32::from_bits(largest);
            let factor = if largest == 0.0 { 0.0 } else { 127.0 / largest };
            head.copy_from_slice(&largest.to_le_bytes());
            integers.iter_mut().zip(values).for_each(|(q, x)| *q = (x * factor + ROUND).to_bits() as u8);
        }
    }

    /// Writes the values of whole groups.
    pub fn decode(self, bytes: &[u8], values: &mut [f32]) {
        assert_eq!((bytes.len(), values.len() % self.len), (self.encoded_len(values.len()), 0), "whole groups");
        for (bytes, values) in bytes.chunks_exact(HEAD + self.len).zip(values.chunks_exact_mut(self.len)) {
            let (head, integers) = bytes.split_at(HEAD);
            let largest = f32::from_le_bytes(head.try_into().expect("the bytes of a float"));
            let scale = largest / 127.0;
            let mut has_largest = false;
            for (value, &q) in values.iter_mut().zip(integers) {
                let q = q as i8;
                has_largest |= q.unsigned_abs() == 127;
                *value = match q {
                    127 => largest,
                    -127 => -largest,
                    _ => f32::from(q) * scale,
                };
            }
            // `largest` is zero, not finite, or so small that 127 / largest is not finite. The product then makes zeros
            // of all values, or nothing but a NaN.
            if !has_largest {
                values.fill(0.0);
                values[0] = largest;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The integers and the bits of the scales of whole groups.
    fn rounded(groups: RoundedGroups, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; groups.encoded_len(values.len())];
        groups.encode(values, &mut bytes);
        bytes
    }

    fn decoded(groups: RoundedGroups, bytes: &[u8], num_values: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; num_values];
        groups.decode(bytes, &mut values);
        values
    }

    #[test]
    fn decoded_values_are_rounded_to_the_same_integers_and_scales() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) as u32
        };
        for groups in [RoundedGroups { len: 32 }, RoundedGroups { len: 256 }] {
            for _ in 0..2_000 {
                // Any finite magnitude, with values over eight powers of two below it.
                let top = random() % 254;
                let value = |bits: u32| f32::from_bits(bits & 0x807f_ffff | top.saturating_sub(bits >> 8 & 7) << 23);
                let values: Vec<f32> = (0..2 * groups.len).map(|_| value(random())).collect();
                let bytes = rounded(groups, &values);
                assert_eq!(rounded(groups, &decoded(groups, &bytes, values.len())), bytes, "2^{top}");
            }
        }
    }

    #[test]
    fn special_groups_stay_what_they_are() {
        let groups = RoundedGroups { len: 32 };
        let with = |x: f32| -> Vec<f32> { (0..32).map(|i| if i == 7 { x } else { 0.0 }).collect() };
        for x in [0.0, -0.0, 1e-45, -1e-40, 3.7e-37, 3.8e-37, f32::MAX, f32::MIN, f32::INFINITY, 1.0] {
            let bytes = rounded(groups, &with(x));
            assert_eq!(rounded(groups, &decoded(groups, &bytes, 32)), bytes, "{x}");
        }
        let bytes = rounded(groups, &with(f32::NAN));
        assert!(decoded(groups, &bytes, 32)[0].is_nan(), "a NaN must reach the results");
    }

    #[test]
    fn largest_values_are_exact() {
        let groups = RoundedGroups { len: 32 };
        let values: Vec<f32> = (0..32).map(|i| (i as f32 - 20.0) / 3.0).collect();
        let found = decoded(groups, &rounded(groups, &values), 32);
        assert_eq!(found[0], values[0]);
        let worst = values.iter().zip(&found).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(worst <= 20.0 / 3.0 / 127.0 / 2.0 * 1.001, "{worst}");
    }
}
