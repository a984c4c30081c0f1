//! Rounding to the quantized formats: the choice of scale, minimum and integers.
//!
//! The formats of 32 values use the scale that the largest value needs. The K formats search the scale, and the minimum
//! if they have one, with the least squared error, each value weighted by its magnitude; the method and its constants
//! are those that llama.cpp publishes, so that files made here are as good as its own. Values must be finite.

use super::{BlockEncoder, BlockFormat, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, f16_to_f32, f32_to_f16};

impl BlockEncoder for Q4_0 {
    fn encode(x: &[f32], block: &mut [u8]) {
        let (d, q) = symmetric(x, 8);
        block[..2].copy_from_slice(&d);
        pack_nibbles(&q, &mut block[2..]);
    }
}

impl BlockEncoder for Q5_0 {
    fn encode(x: &[f32], block: &mut [u8]) {
        let (d, q) = symmetric(x, 16);
        block[..2].copy_from_slice(&d);
        pack_fifth_bits(&q, &mut block[2..6]);
        pack_nibbles(&q, &mut block[6..]);
    }
}

impl BlockEncoder for Q4_1 {
    fn encode(x: &[f32], block: &mut [u8]) {
        let (d_and_m, q) = from_minimum(x, 15);
        block[..4].copy_from_slice(&d_and_m);
        pack_nibbles(&q, &mut block[4..]);
    }
}

impl BlockEncoder for Q5_1 {
    fn encode(x: &[f32], block: &mut [u8]) {
        let (d_and_m, q) = from_minimum(x, 31);
        block[..4].copy_from_slice(&d_and_m);
        pack_fifth_bits(&q, &mut block[4..8]);
        pack_nibbles(&q, &mut block[8..]);
    }
}

/// `x = d (q - half)`: d makes the value of largest magnitude -half steps, because there is one more step on that side.
fn symmetric(x: &[f32], half: u8) -> ([u8; 2], [u8; 32]) {
    let largest = x.iter().fold(0.0f32, |largest, &x| if x.abs() > largest.abs() { x } else { largest });
    let d = largest / -f32::from(half);
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let steps = |x: f32| (x * inverse + f32::from(half) + 0.5).clamp(0.0, f32::from(2 * half - 1)) as u8;
    (f32_to_f16(d).to_le_bytes(), std::array::from_fn(|i| steps(x[i])))
}

/// `x = d q + m`: m is the smallest value, and d makes the largest one `max_q` steps.
fn from_minimum(x: &[f32], max_q: u8) -> ([u8; 4], [u8; 32]) {
    let (low, high) = x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &x| (low.min(x), high.max(x)));
    let d = (high - low) / f32::from(max_q);
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let steps = |x: f32| ((x - low) * inverse + 0.5).clamp(0.0, f32::from(max_q)) as u8;
    let ([a, b], [c, d]) = (f32_to_f16(d).to_le_bytes(), f32_to_f16(low).to_le_bytes());
    ([a, b, c, d], std::array::from_fn(|i| steps(x[i])))
}

/// Low halves of bytes from the first 16 values, high halves from the others.
fn pack_nibbles(q: &[u8; 32], out: &mut [u8]) {
    for j in 0..16 {
        out[j] = q[j] & 0x0f | q[j + 16] << 4;
    }
}

fn pack_fifth_bits(q: &[u8; 32], out: &mut [u8]) {
    let bits = q.iter().enumerate().fold(0u32, |bits, (j, q)| bits | u32::from(q >> 4 & 1) << j);
    out.copy_from_slice(&bits.to_le_bytes());
}

/// The scales that are tried for a sub-block, as inverses: `(max_q + first + step * i) / range`.
struct Search {
    max_q: f32,
    first: f32,
    num_tries: usize,
}

const FOUR_BITS: Search = Search { max_q: 15.0, first: -1.0, num_tries: 21 };
const FIVE_BITS: Search = Search { max_q: 31.0, first: -0.5, num_tries: 16 };
/// Distance between two tries.
const TRY_STEP: f32 = 0.1;

impl BlockEncoder for Q4_K {
    fn encode(x: &[f32], block: &mut [u8]) {
        let SubBlocks { d, dmin, scales, q } = SubBlocks::fit(x, &FOUR_BITS);
        block[..2].copy_from_slice(&d.to_le_bytes());
        block[2..4].copy_from_slice(&dmin.to_le_bytes());
        block[4..16].copy_from_slice(&scales);
        for (j, byte) in block[16..].iter_mut().enumerate() {
            let (pair, at) = (j / 32, j % 32);
            *byte = q[64 * pair + at] | q[64 * pair + 32 + at] << 4;
        }
    }
}

impl BlockEncoder for Q5_K {
    fn encode(x: &[f32], block: &mut [u8]) {
        let SubBlocks { d, dmin, scales, q } = SubBlocks::fit(x, &FIVE_BITS);
        block[..2].copy_from_slice(&d.to_le_bytes());
        block[2..4].copy_from_slice(&dmin.to_le_bytes());
        block[4..16].copy_from_slice(&scales);
        for (j, byte) in block[16..48].iter_mut().enumerate() {
            *byte = (0..8).fold(0, |bits, s| bits | (q[32 * s + j] >> 4) << s);
        }
        for (j, byte) in block[48..].iter_mut().enumerate() {
            let (pair, at) = (j / 32, j % 32);
            *byte = q[64 * pair + at] & 0x0f | q[64 * pair + 32 + at] << 4;
        }
    }
}

/// 256 values as eight sub-blocks with a scale and a minimum each.
struct SubBlocks {
    d: u16,
    dmin: u16,
    /// Six bits each, packed as the formats store them.
    scales: [u8; 12],
    q: [u8; 256],
}

impl SubBlocks {
    fn fit(x: &[f32], search: &Search) -> SubBlocks {
        let fits: [Affine; 8] = std::array::from_fn(|s| Affine::fit(&x[32 * s..32 * s + 32], search));
        let largest = |of: fn(&Affine) -> f32| fits.iter().map(of).fold(0.0, f32::max);
        let (max_scale, max_min) = (largest(|fit| fit.scale), largest(|fit| fit.min));
        let six_bits = |value: f32, largest: f32| {
            if largest > 0.0 { (63.0 / largest * value).round_ties_even().clamp(0.0, 63.0) as u8 } else { 0 }
        };
        let scales: [u8; 8] = std::array::from_fn(|s| six_bits(fits[s].scale, max_scale));
        let mins: [u8; 8] = std::array::from_fn(|s| six_bits(fits[s].min, max_min));
        let (d, dmin) = (f32_to_f16(max_scale / 63.0), f32_to_f16(max_min / 63.0));
        // The integers are chosen again for the scales as they are stored.
        let mut q = [0; 256];
        for s in 0..8 {
            let scale = f16_to_f32(d) * f32::from(scales[s]);
            let min = f16_to_f32(dmin) * f32::from(mins[s]);
            if scale != 0.0 {
                for i in 32 * s..32 * s + 32 {
                    q[i] = ((x[i] + min) / scale).round_ties_even().clamp(0.0, search.max_q) as u8;
                }
            }
        }
        SubBlocks { d, dmin, scales: pack_scales(&scales, &mins), q }
    }
}

/// Packs scales and minimums as the decoder of Q4_K and Q5_K reads them.
fn pack_scales(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for s in 0..4 {
        packed[s] = scales[s] | (scales[s + 4] & 0x30) << 2;
        packed[s + 4] = mins[s] | (mins[s + 4] & 0x30) << 2;
        packed[s + 8] = scales[s + 4] & 0x0f | mins[s + 4] << 4;
    }
    packed
}

/// `x = scale q - min`, both not negative.
#[derive(Debug, Clone, Copy)]
struct Affine {
    scale: f32,
    min: f32,
}

impl Affine {
    /// Returns the best of several tries. Each rounds by one scale, then solves for the best scale and minimum of those
    /// integers; the next try rounds from the best minimum so far.
    fn fit(x: &[f32], search: &Search) -> Affine {
        let mean_square = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
        let weights: [f32; 32] = std::array::from_fn(|i| mean_square.sqrt() + x[i].abs());
        let (low, high) = x.iter().fold((0.0f32, f32::NEG_INFINITY), |(low, high), &x| (low.min(x), high.max(x)));
        if high <= low {
            return Affine { scale: 0.0, min: -low };
        }
        // Rounds with `steps` steps between the minimum and the largest value.
        let rounded = |steps: f32, min: f32| -> [f32; 32] {
            let factor = steps / (high + min);
            std::array::from_fn(|i| (factor * (x[i] + min)).round_ties_even().clamp(0.0, search.max_q))
        };
        let error = |fit: Affine, q: &[f32; 32]| -> f32 {
            (0..32).map(|i| weights[i] * (fit.scale * q[i] - fit.min - x[i]).powi(2)).sum()
        };
        let mut best = Affine { scale: (high - low) / search.max_q, min: -low };
        let mut least = error(best, &rounded(search.max_q, best.min));
        for i in 0..search.num_tries {
            let q = rounded(search.max_q + search.first + TRY_STEP * i as f32, best.min);
            if let Some(fit) = Affine::solve(x, &weights, &q) {
                let found = error(fit, &q);
                if found < least {
                    (best, least) = (fit, found);
                }
            }
        }
        best
    }

    /// Weighted least squares for given integers; without a minimum when the best one would be negative.
    fn solve(x: &[f32], weights: &[f32; 32], q: &[f32; 32]) -> Option<Affine> {
        let sum = |f: &dyn Fn(usize) -> f32| (0..32).map(|i| weights[i] * f(i)).sum::<f32>();
        let (w, wq, wqq) = (weights.iter().sum::<f32>(), sum(&|i| q[i]), sum(&|i| q[i] * q[i]));
        let (wx, wqx) = (sum(&|i| x[i]), sum(&|i| q[i] * x[i]));
        let determinant = w * wqq - wq * wq;
        if determinant <= 0.0 {
            return None;
        }
        let min = (wq * wqx - wqq * wx) / determinant;
        let fit = if min < 0.0 {
            Affine { scale: wqx / wqq, min: 0.0 }
        } else {
            Affine { scale: (w * wqx - wx * wq) / determinant, min }
        };
        (fit.scale > 0.0).then_some(fit)
    }
}

impl BlockEncoder for Q6_K {
    fn encode(x: &[f32], block: &mut [u8]) {
        let fits: [f32; 16] = std::array::from_fn(|s| fit_scale(&x[16 * s..16 * s + 16]));
        let largest = fits.iter().fold(0.0f32, |largest, &fit| if fit.abs() > largest.abs() { fit } else { largest });
        block.fill(0);
        // The inverse of a smaller range would overflow; such a block becomes zeros.
        if largest.abs() < 1e-15 {
            return;
        }
        let inverse = -128.0 / largest;
        let d = f32_to_f16(1.0 / inverse);
        block[208..].copy_from_slice(&d.to_le_bytes());
        let mut q = [32u8; Q6_K::LEN];
        for s in 0..16 {
            let scale = (inverse * fits[s]).round_ties_even().clamp(-128.0, 127.0) as i8;
            block[192 + s] = scale as u8;
            let step = f16_to_f32(d) * f32::from(scale);
            if step != 0.0 {
                for i in 16 * s..16 * s + 16 {
                    q[i] = ((x[i] / step).round_ties_even().clamp(-32.0, 31.0) as i8 + 32) as u8;
                }
            }
        }
        for half in 0..2 {
            for j in 0..32 {
                let run = |r: usize| q[128 * half + 32 * r + j];
                block[64 * half + j] = run(0) & 0x0f | run(2) << 4;
                block[64 * half + 32 + j] = run(1) & 0x0f | run(3) << 4;
                block[128 + 32 * half + j] = (0..4).fold(0, |bits, r| bits | (run(r) >> 4) << (2 * r));
            }
        }
    }
}

/// Returns the scale of `x = scale q`, q from -32 to 31, with the least error weighted by the squares of the values:
/// the best of 19 tries around the scale that the largest value needs.
fn fit_scale(x: &[f32]) -> f32 {
    let largest = x.iter().fold(0.0f32, |largest, &x| if x.abs() > largest.abs() { x } else { largest });
    if largest.abs() < 1e-15 {
        return 0.0;
    }
    // The scale of the largest value comes first, so it wins a tie.
    let tries = std::iter::once(0).chain((-9..=9).filter(|&i| i != 0));
    let (mut scale, mut best) = (0.0, 0.0);
    for i in tries {
        let factor = -(32.0 + 0.1 * i as f32) / largest;
        let (mut wqx, mut wqq) = (0.0f32, 0.0f32);
        for &x in x {
            let q = (factor * x).round_ties_even().clamp(-32.0, 31.0);
            wqx += x * x * q * x;
            wqq += x * x * q * q;
        }
        // Keeps the scale that reduces the error most, compared with all zeros.
        if wqq > 0.0 && wqx * wqx > best * wqq {
            (scale, best) = (wqx / wqq, wqx * wqx / wqq);
        }
    }
    scale
}
