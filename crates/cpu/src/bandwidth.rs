//! How fast the machine reads its memory: the limit beside which products are measured.

use std::time::Instant;

use pellucid_tensor::Error;

use crate::memory::HostMemory;
use crate::pool::Pool;
use crate::simd::{Simd, vectorized};

/// Sweeps over the buffer; the first ones bring it in and wake the threads, and the best is what the memory can do.
const SWEEPS: usize = 12;
/// Bytes that a thread takes at a time: enough to run at full speed, few enough to share out evenly.
const STRETCH: usize = 1 << 20;

/// Places of a stretch that are read in turns, and how far ahead of its use memory is asked for in each, as the products do: four
/// streams read faster than one.
const STREAMS: usize = 4;
const PREFETCH_BYTES: usize = 2 * 1024;

#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may go anywhere, and every processor of this family has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

vectorized! {
    /// Reads everything, in eight sums for each stream so that additions do not wait for each other.
    fn sum<S: Simd>(bytes: &[u8]) -> u64 {
        let mut sums = [[0u64; 8]; STREAMS];
        let stride = bytes.len() / STREAMS;
        for line in (0..stride).step_by(64) {
            for (stream, sums) in sums.iter_mut().enumerate() {
                let line = &bytes[stream * stride + line..][..64];
                prefetch(line.as_ptr().wrapping_add(PREFETCH_BYTES));
                for (sum, word) in sums.iter_mut().zip(line.chunks_exact(8)) {
                    *sum = sum.wrapping_add(u64::from_le_bytes(word.try_into().expect("eight bytes")));
                }
            }
        }
        sums.as_flattened().iter().fold(0, |all, sum| all.wrapping_add(*sum))
    }
}

/// Bytes a second that all threads together read from a buffer of `size` bytes, at best.
pub(crate) fn read_bandwidth<S: Simd>(simd: S, pool: &Pool, size: usize) -> Result<f64, Error> {
    let size = size.next_multiple_of(STRETCH);
    let mut memory = HostMemory::zeroed(size)?;
    // As weights are kept: with small pages the limit would be lower than what they are read at.
    memory.prefer_huge_pages();
    // Zero pages of the system are one and the same page until they are written to.
    memory.bytes_mut().iter_mut().step_by(64).enumerate().for_each(|(i, byte)| *byte = i as u8);
    let bytes = memory.bytes();
    let mut best = f64::INFINITY;
    for _ in 0..SWEEPS {
        let started = Instant::now();
        pool.run(size / STRETCH, &|stretch| {
            std::hint::black_box(sum(simd, &bytes[stretch * STRETCH..(stretch + 1) * STRETCH]));
        });
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(size as f64 / best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Scalar;

    #[test]
    fn reading_takes_time() {
        let speed = read_bandwidth(Scalar, &Pool::new(2).expect("threads"), 4 << 20).expect("four megabytes");
        assert!((1e6..1e13).contains(&speed), "{speed} bytes a second");
    }
}
