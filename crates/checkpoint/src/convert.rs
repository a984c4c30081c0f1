//! Writes a model once more, its tensors in other formats.
//!
//! Which tensor gets which format is the caller's choice; here numbers are decoded, rounded and written, and the error that the rounding
//! left is measured. `pellucid quantize` calls it.

use std::io::Write;
use std::path::Path;

use pellucid_tensor::{DType, SharedBytes, quant};

use crate::error::{Error, quote};
use crate::{GgufWriter, Metadata, NewTensor};

/// One tensor that was written.
#[derive(Debug, Clone)]
pub struct ConvertedTensor<'a> {
    pub tensor: &'a NewTensor,
    /// Root of the mean squared error over the root of the mean square; 0 for a tensor of zeros.
    pub relative_error: f64,
}

/// Where the numbers of a new file come from.
pub trait TensorSource {
    /// For messages.
    fn path(&self) -> &Path;

    /// The numbers of a tensor of the new file, by its place in the list, and the format that they are in.
    fn tensor(&self, index: usize) -> Result<(DType, SharedBytes), Error>;
}

/// Sums over numbers and what became of them.
#[derive(Debug, Clone, Copy, Default)]
struct Errors {
    squares: f64,
    squared_errors: f64,
    /// A number that no format can stand for.
    not_finite: bool,
}

/// Writes `tensors`, each with as many numbers as the source gives for it, as one GGUF file. `path` is for messages.
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

/// Decodes, encodes and compares, rows shared out to threads. No row touches another, so their number changes nothing.
fn encode(from: DType, bytes: &[u8], tensor: &NewTensor, num_threads: usize, out: &mut [u8]) -> Errors {
    let cols = tensor.shape.last().copied().unwrap_or(1);
    let whole = "rows were checked to be whole blocks";
    let (from_row, to_row) = (from.bytes_for(cols).expect(whole), tensor.dtype.bytes_for(cols).expect(whole));
    let rows_per_thread = (out.len() / to_row).div_ceil(num_threads.max(1)).max(1);
    let parts = bytes.chunks(rows_per_thread * from_row).zip(out.chunks_mut(rows_per_thread * to_row));
    std::thread::scope(|scope| {
        let threads: Vec<_> = parts
            .map(|(bytes, out)| {
                scope.spawn(move || {
                    let (mut numbers, mut rounded) = (vec![0.0; cols], vec![0.0; cols]);
                    let mut errors = Errors::default();
                    for (bytes, out) in bytes.chunks_exact(from_row).zip(out.chunks_exact_mut(to_row)) {
                        quant::decode(from, bytes, &mut numbers);
                        quant::encode(tensor.dtype, &numbers, out);
                        quant::decode(tensor.dtype, out, &mut rounded);
                        errors.add(&numbers, &rounded);
                    }
                    errors
                })
            })
            .collect();
        // Threads end in order of their rows here, so the sums have one order as well.
        threads.into_iter().map(|thread| thread.join().expect("encoding does not panic")).fold(
            Errors::default(),
            |all, part| Errors {
                squares: all.squares + part.squares,
                squared_errors: all.squared_errors + part.squared_errors,
                not_finite: all.not_finite || part.not_finite,
            },
        )
    })
}

impl Errors {
    /// What came out is checked as well: a number beyond the range of f16 is infinite there.
    fn add(&mut self, numbers: &[f32], rounded: &[f32]) {
        for (&number, &rounded) in numbers.iter().zip(rounded) {
            self.squares += f64::from(number).powi(2);
            self.squared_errors += (f64::from(number) - f64::from(rounded)).powi(2);
            self.not_finite |= !number.is_finite() || !rounded.is_finite();
        }
    }
}
