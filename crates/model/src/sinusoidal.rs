//! The position table of the original transformer, as XGLM uses it.

use pellucid_tensor::{DType, HostWeight};

/// XGLM counts positions from 2: the first two rows belonged to padding in the library that it was trained with.
const FIRST_POSITION: usize = 2;

/// `[context][hidden]`: the sines of all frequencies, then the cosines; the frequencies fall from 1 to 1 / 10,000.
pub(crate) fn table(context_len: usize, hidden_size: usize) -> HostWeight {
    let half = hidden_size / 2;
    let step = 10_000f64.ln() / (half as f64 - 1.0).max(1.0);
    let mut bytes = Vec::with_capacity(context_len * hidden_size * 4);
    for position in FIRST_POSITION..FIRST_POSITION + context_len {
        let angle = |i: usize| position as f64 * (-(i as f64) * step).exp();
        let row = (0..half).map(|i| angle(i).sin()).chain((0..half).map(|i| angle(i).cos()));
        // An odd size is filled up with a zero.
        let padding = std::iter::repeat_n(0.0, hidden_size % 2);
        bytes.extend(row.chain(padding).flat_map(|value| (value as f32).to_le_bytes()));
    }
    HostWeight { dtype: DType::F32, rows: context_len, cols: hidden_size, bytes: bytes.into() }
}
