//! The sinusoidal position table of the original transformer, as XGLM uses it.

use pellucid_tensor::{DType, Error, HostWeight};

/// XGLM counts positions from 2: fairseq, which it was trained with, reserves the first two rows for padding.
const FIRST_POSITION: usize = 2;

/// Returns the table `[context][hidden]`. Each row has the sines of all frequencies, then the cosines; the frequencies
/// fall from 1 to 1 / 10,000.
///
/// `context_len` comes from a file, so the table may not fit into memory; that is an error.
pub(crate) fn table(context_len: usize, hidden_size: usize) -> Result<HostWeight, Error> {
    let half = hidden_size / 2;
    let step = 10_000f64.ln() / (half as f64 - 1.0).max(1.0);
    let num_bytes = context_len.saturating_mul(hidden_size).saturating_mul(4);
    let mut bytes = Vec::new();
    if bytes.try_reserve_exact(num_bytes).is_err() {
        return Err(Error::OutOfMemory { device: "the host".into(), bytes: num_bytes });
    }
    for position in FIRST_POSITION..FIRST_POSITION + context_len {
        let angle = |i: usize| position as f64 * (-(i as f64) * step).exp();
        let row = (0..half).map(|i| angle(i).sin()).chain((0..half).map(|i| angle(i).cos()));
        // A row of odd length ends in a zero.
        let padding = std::iter::repeat_n(0.0, hidden_size % 2);
        bytes.extend(row.chain(padding).flat_map(|value| (value as f32).to_le_bytes()));
    }
    Ok(HostWeight { dtype: DType::F32, rows: context_len, cols: hidden_size, bytes: bytes.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_beyond_memory_is_an_error() {
        assert_eq!(table(3, 4).unwrap().bytes.len(), 48);
        let error = table(1 << 24, 1 << 24).unwrap_err().to_string();
        assert!(error.contains("out of memory") && error.contains(&(1u64 << 50).to_string()), "{error}");
    }
}
