//! Writes a GGUF file, version 3: first the header, then the data of one tensor at a time, so that a model larger than
//! memory can be written.

use std::collections::VecDeque;
use std::io::{self, Write};

use pellucid_tensor::DType;

use super::header::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_ALIGNMENT};
use super::metadata::Metadata;
use super::tensor_type;
use super::value::{Array, StringArray, Value};

/// The description of a tensor to be written. The shape has the contiguous dimension last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTensor {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

/// A file that is being written. The tensors must be written in the order of the header.
#[derive(Debug)]
pub struct GgufWriter<W> {
    out: W,
    /// Names and sizes in bytes of the tensors that are not written yet.
    pending: VecDeque<(String, usize)>,
    alignment: usize,
}

impl NewTensor {
    /// Returns the number of bytes. Panics unless a row is a whole number of the format's blocks.
    pub fn num_bytes(&self) -> usize {
        let row = self.shape.last().copied().unwrap_or(1);
        let row_bytes = self.dtype.bytes_for(row);
        let row_bytes = row_bytes.unwrap_or_else(|| {
            panic!("{}: a row of {row} values is not a whole number of {} blocks", self.name, self.dtype)
        });
        self.shape.iter().rev().skip(1).product::<usize>() * row_bytes
    }
}

impl<W: Write> GgufWriter<W> {
    /// Writes everything before the data. The alignment is the one in `metadata`, so that a converted file keeps it.
    /// Returns an error for a format that GGUF does not have.
    pub fn new(mut out: W, metadata: &Metadata, tensors: &[NewTensor]) -> io::Result<Self> {
        let alignment = metadata.opt_u32(ALIGNMENT_KEY).ok().flatten().map_or(DEFAULT_ALIGNMENT, u64::from) as usize;
        assert!(alignment.is_power_of_two() && alignment as u64 <= MAX_ALIGNMENT, "an alignment of {alignment}");
        let mut header = Vec::from(MAGIC);
        header.extend(3u32.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata.iter() {
            put_string(&mut header, key);
            put_value(&mut header, value);
        }
        let mut offset = 0u64;
        for tensor in tensors {
            put_string(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&dim| header.extend((dim as u64).to_le_bytes()));
            let number = tensor_type::number(tensor.dtype).ok_or_else(|| {
                let NewTensor { name, dtype, .. } = tensor;
                io::Error::new(io::ErrorKind::InvalidInput, format!("GGUF has no type {dtype}, that of tensor {name}"))
            })?;
            header.extend(number.to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset += tensor.num_bytes().next_multiple_of(alignment) as u64;
        }
        header.resize(header.len().next_multiple_of(alignment), 0);
        out.write_all(&header)?;
        let pending = tensors.iter().map(|tensor| (tensor.name.clone(), tensor.num_bytes())).collect();
        Ok(GgufWriter { out, pending, alignment })
    }

    /// Writes the next tensor's data. Panics unless it has the length that the header states.
    pub fn write_tensor(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (name, num_bytes) = self.pending.pop_front().expect("no more tensors than the header has");
        assert_eq!(bytes.len(), num_bytes, "the bytes of {name}");
        self.out.write_all(bytes)?;
        let padding = num_bytes.next_multiple_of(self.alignment) - num_bytes;
        self.out.write_all(&vec![0; padding])
    }

    /// Flushes and returns the output. Panics if tensors of the header are missing.
    pub fn finish(mut self) -> io::Result<W> {
        assert!(self.pending.is_empty(), "{} tensors of the header were not written", self.pending.len());
        self.out.flush()?;
        Ok(self.out)
    }
}

fn put_string(out: &mut Vec<u8>, string: &str) {
    out.extend((string.len() as u64).to_le_bytes());
    out.extend(string.as_bytes());
}

/// Writes an array of numbers: type number, length and values.
macro_rules! numbers {
    ($out:expr, $kind:expr, $values:expr) => {{
        put_kind($out, $kind, $values.len());
        $values.iter().for_each(|value| $out.extend(value.to_le_bytes()));
    }};
}

/// Writes a type number and a value.
fn put_value(out: &mut Vec<u8>, value: &Value) {
    let mut put = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U8(v) => put(0, &v.to_le_bytes()),
        Value::I8(v) => put(1, &v.to_le_bytes()),
        Value::U16(v) => put(2, &v.to_le_bytes()),
        Value::I16(v) => put(3, &v.to_le_bytes()),
        Value::U32(v) => put(4, &v.to_le_bytes()),
        Value::I32(v) => put(5, &v.to_le_bytes()),
        Value::F32(v) => put(6, &v.to_le_bytes()),
        Value::Bool(v) => put(7, &[u8::from(*v)]),
        Value::String(v) => {
            put(8, &[]);
            put_string(out, v);
        }
        Value::Array(array) => {
            put(9, &[]);
            put_array(out, array);
        }
        Value::U64(v) => put(10, &v.to_le_bytes()),
        Value::I64(v) => put(11, &v.to_le_bytes()),
        Value::F64(v) => put(12, &v.to_le_bytes()),
    }
}

/// Writes the element type and length of an array.
fn put_kind(out: &mut Vec<u8>, kind: u32, len: usize) {
    out.extend(kind.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

/// Writes an array: element type, length and elements.
fn put_array(out: &mut Vec<u8>, array: &Array) {
    match array {
        Array::U8(v) => numbers!(out, 0, v),
        Array::I8(v) => numbers!(out, 1, v),
        Array::U16(v) => numbers!(out, 2, v),
        Array::I16(v) => numbers!(out, 3, v),
        Array::U32(v) => numbers!(out, 4, v),
        Array::I32(v) => numbers!(out, 5, v),
        Array::F32(v) => numbers!(out, 6, v),
        Array::Bool(v) => {
            put_kind(out, 7, v.len());
            out.extend(v.iter().map(|&value| u8::from(value)));
        }
        Array::Strings(v) => put_strings(out, v),
        Array::Arrays(v) => {
            put_kind(out, 9, v.len());
            v.iter().for_each(|array| put_array(out, array));
        }
        Array::U64(v) => numbers!(out, 10, v),
        Array::I64(v) => numbers!(out, 11, v),
        Array::F64(v) => numbers!(out, 12, v),
    }
}

fn put_strings(out: &mut Vec<u8>, strings: &StringArray) {
    put_kind(out, 8, strings.len());
    strings.iter().for_each(|string| put_string(out, string));
}
