//! Writes a model as a GGUF file with its tensors in other formats.
//!
//! The caller chooses the format of each tensor. Values are decoded, rounded and written, and the rounding error is
//! measured. `pellucid quantize` calls this.

use std::io::Write;
use std::path::Path;

use pellucid_tensor::{DType, SharedBytes, quant};

use crate::error::{Error, quote};
use crate::{GgufWriter, Metadata, NewTensor};

/// A tensor that was written.
#[derive(Debug, Clone)]
pub struct ConvertedTensor<'a> {
    pub tensor: &'a NewTensor,
    /// Root mean square of the error, divided by that of the values; 0 for a tensor of zeros.
    pub relative_error: f64,
}

/// The source of a new file's values.
pub trait TensorSource {
    /// Returns the path of the source, for messages.
    fn path(&self) -> &Path;

    /// Returns the values of the new file's tensor `index`, and the format that they are in.
    fn tensor(&self, index: usize) -> Result<(DType, SharedBytes), Error>;
}

/// Sums over values and their rounding errors.
#[derive(Debug, Clone, Copy, Default)]
struct ErrorSums {
    squares: f64,
    squared_errors: f64,
    /// A value is not finite, before or after rounding.
    not_finite: bool,
}

/// Writes `tensors` with the values of `source` as one GGUF file. `path` is for messages. Calls `progress` after each
/// tensor.
pub fn write_converted<W: Write>(
    source: &dyn TensorSource,
    metadata: &Metadata,
    tensors: &[NewTensor],
    num_threads: usize,
    (path, out): (&Path, W),
    progress: &mut dyn FnMut(ConvertedTensor<'_>),
) -> Result<W, Error> {
    let failed = |source| Error::io(path, "write", source);
    let mut writer = GgufWriter::new(out, metadata, tensors).map_err(failed)?;
    for (index, tensor) in tensors.iter().enumerate() {
        let (from, bytes) = source.tensor(index)?;
        let num_bytes = from.bytes_for(tensor.shape.iter().product());
        assert_eq!(Some(bytes.len()), num_bytes, "{} keeps its shape", tensor.name);
        let mut relative_error = 0.0;
        if from == tensor.dtype {
            writer.write_tensor(&bytes).map_err(failed)?;
        } else {
            let mut encoded = vec![0; tensor.num_bytes()];
            let errors = encode(from, &bytes, tensor, num_threads, &mut encoded);
            if errors.not_finite {
                let (path, tensor) = (source.path().to_path_buf(), quote(&tensor.name));
                return Err(Error::NotFinite { path, tensor });
            }
            if errors.squares > 0.0 {
                relative_error = (errors.squared_errors / errors.squares).sqrt();
            }
            writer.write_tensor(&encoded).map_err(failed)?;
        }
        progress(ConvertedTensor { tensor, relative_error });
    }
    writer.finish().map_err(failed)
}

/// Decodes, encodes and compares, with the rows divided among threads. Rows are independent, so the number of threads
/// does not change the result.
fn encode(from: DType, bytes: &[u8], tensor: &NewTensor, num_threads: usize, out: &mut [u8]) -> ErrorSums {
    let cols = tensor.shape.last().copied().unwrap_or(1);
    let whole = "rows were checked to be whole blocks";
    let (from_row, to_row) = (from.bytes_for(cols).expect(whole), tensor.dtype.bytes_for(cols).expect(whole));
    let rows_per_thread = (out.len() / to_row).div_ceil(num_threads.max(1)).max(1);
    let parts = bytes.chunks(rows_per_thread * from_row).zip(out.chunks_mut(rows_per_thread * to_row));
    std::thread::scope(|scope| {
        let threads: Vec<_> = parts
            .map(|(bytes, out)| {
                scope.spawn(move || {
                    let (mut values, mut rounded) = (vec![0.0; cols], vec![0.0; cols]);
                    let mut errors = ErrorSums::default();
                    for (bytes, out) in bytes.chunks_exact(from_row).zip(out.chunks_exact_mut(to_row)) {
                        quant::decode(from, bytes, &mut values);
                        quant::encode(tensor.dtype, &values, out);
                        quant::decode(tensor.dtype, out, &mut rounded);
                        errors.add(&values, &rounded);
                    }
                    errors
                })
            })
            .collect();
        // Joined in the order of the rows, so the order of the sums is fixed.
        threads.into_iter().map(|thread| thread.join().expect("encoding does not panic")).fold(
            ErrorSums::default(),
            |all, part| ErrorSums {
                squares: all.squares + part.squares,
                squared_errors: all.squared_errors + part.squared_errors,
                not_finite: all.not_finite || part.not_finite,
            },
        )
    })
}

impl ErrorSums {
    /// Adds a row. Rounded values are checked too: a value beyond the range of f16 becomes infinite.
    fn add(&mut self, values: &[f32], rounded: &[f32]) {
        for (&value, &rounded) in values.iter().zip(rounded) {
            self.squares += f64::from(value).powi(2);
            self.squared_errors += (f64::from(value) - f64::from(rounded)).powi(2);
            self.not_finite |= !value.is_finite() || !rounded.is_finite();
        }
    }
}
