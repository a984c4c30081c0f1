//! Rotary position embedding (RoPE): pairs of values of a head are rotated by an angle that grows with the position.

use pellucid_tensor::RopeStyle;

use crate::simd::vectorized;

/// Computes one row of angles: `cos(position * f)` for every frequency f, then the sines, all times `factor`.
///
/// The product is rounded to f32 before the cosine, as the reference implementations do; `libm` gives the same bits on
/// every machine.
pub(crate) fn angles_row(position: u32, frequencies: &[f32], factor: f32, out: &mut [f32]) {
    let (cosines, sines) = out.split_at_mut(frequencies.len());
    for ((cosine, sine), frequency) in cosines.iter_mut().zip(sines).zip(frequencies) {
        let (s, c) = libm::sincos(f64::from(position as f32 * frequency));
        *cosine = c as f32 * factor;
        *sine = s as f32 * factor;
    }
}

vectorized! {
    /// Rotates each head of a row. `angles` is a row of [`angles_row`]; values of a head beyond twice the number of
    /// angles are not rotated.
    pub(crate) fn rotate_row<S: Simd>(row: &mut [f32], angles: &[f32], head_size: usize, style: RopeStyle) {
        let pairs = angles.len() / 2;
        let (cosines, sines) = angles.split_at(pairs);
        for head in row.chunks_exact_mut(head_size) {
            match style {
                RopeStyle::Half => {
                    let (first, second) = head[..2 * pairs].split_at_mut(pairs);
                    for i in 0..pairs {
                        let (a, b) = (first[i], second[i]);
                        first[i] = a * cosines[i] - b * sines[i];
                        second[i] = b * cosines[i] + a * sines[i];
                    }
                }
                RopeStyle::Interleaved => {
                    for (i, pair) in head[..2 * pairs].chunks_exact_mut(2).enumerate() {
                        let (a, b) = (pair[0], pair[1]);
                        pair[0] = a * cosines[i] - b * sines[i];
                        pair[1] = b * cosines[i] + a * sines[i];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Scalar;

    #[test]
    fn both_styles_rotate_the_same_pairs_by_the_same_angle() {
        let frequencies = [1.0, 0.25];
        let mut angles = [0.0; 4];
        angles_row(3, &frequencies, 1.0, &mut angles);
        assert!((angles[0] - 3f32.cos()).abs() < 1e-6 && (angles[3] - 0.75f32.sin()).abs() < 1e-6);

        // A head of five: two pairs, and one value that is not rotated.
        let mut half = [1.0, 2.0, 3.0, 4.0, 9.0];
        let mut interleaved = [1.0, 3.0, 2.0, 4.0, 9.0];
        rotate_row(Scalar, &mut half, &angles, 5, RopeStyle::Half);
        rotate_row(Scalar, &mut interleaved, &angles, 5, RopeStyle::Interleaved);
        assert_eq!([half[0], half[2], half[1], half[3], half[4]], interleaved);
        assert!((half[0] - (3f32.cos() - 3.0 * 3f32.sin())).abs() < 1e-6);
        assert_eq!(half[4], 9.0);
    }
}
