//! Measures how fast all threads read memory: the upper limit for products with one row.

use std::time::Instant;

use pellucid_tensor::Error;

use crate::memory::HostMemory;
use crate::pool::Pool;
use crate::simd::{Simd, prefetch_to_l1, vectorized};

/// Sweeps over the buffer. The first ones fill the caches and wake the threads; the fastest one counts.
const SWEEPS: usize = 12;
/// Bytes of a task: enough to read at full speed, few enough to divide evenly.
const TASK_BYTES: usize = 1 << 20;

/// Parts of a task that are read in turns, as products do: four streams are faster than one.
const STREAMS: usize = 4;
/// Distance in bytes from the prefetched line to the line that is read.
const PREFETCH_BYTES: usize = 2 * 1024;

vectorized! {
    /// Reads all bytes, into eight sums for each stream so that additions do not wait for each other.
    fn sum<S: Simd>(bytes: &[u8]) -> u64 {
        let mut sums = [[0u64; 8]; STREAMS];
        let stride = bytes.len() / STREAMS;
        for line in (0..stride).step_by(64) {
            for (stream, sums) in sums.iter_mut().enumerate() {
                let line = &bytes[stream * stride + line..][..64];
                prefetch_to_l1(line.as_ptr().wrapping_add(PREFETCH_BYTES));
                for (sum, word) in sums.iter_mut().zip(line.chunks_exact(8)) {
                    *sum = sum.wrapping_add(u64::from_le_bytes(word.try_into().expect("eight bytes")));
                }
            }
        }
        sums.as_flattened().iter().fold(0, |all, sum| all.wrapping_add(*sum))
    }
}

/// Returns the bytes per second that all threads together read from a buffer of `size` bytes, in the fastest sweep.
pub(crate) fn read_bandwidth<S: Simd>(simd: S, pool: &Pool, size: usize) -> Result<f64, Error> {
    let size = size.next_multiple_of(TASK_BYTES);
    let mut memory = HostMemory::zeroed(size)?;
    // Weights lie on huge pages too; with small pages the measured limit would be below the speed of products.
    memory.prefer_huge_pages();
    // Every untouched page is the same physical page of zeros, which would be read from a cache.
    memory.bytes_mut().iter_mut().step_by(64).enumerate().for_each(|(i, byte)| *byte = i as u8);
    let bytes = memory.bytes();
    let mut best = f64::INFINITY;
    for _ in 0..SWEEPS {
        let started = Instant::now();
        pool.run(size / TASK_BYTES, &|task| {
            std::hint::black_box(sum(simd, &bytes[task * TASK_BYTES..(task + 1) * TASK_BYTES]));
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
    #[cfg_attr(miri, ignore = "reads too much memory for an interpreter")]
    fn reading_takes_time() {
        let speed = read_bandwidth(Scalar, &Pool::new(2).expect("threads"), 4 << 20).expect("four megabytes");
        assert!((1e6..1e13).contains(&speed), "{speed} bytes per second");
    }
}
