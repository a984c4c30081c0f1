//! The values of GGUF metadata, and how they are read.
//!
//! Type numbers: 0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, 6 f32, 7 bool, 8 string, 9 array, 10 u64, 11 i64, 12 f64. An
//! array consists of its element type, its length, and its elements, which may be arrays.

use std::fmt::Display;

use super::reader::Reader;
use crate::error::Error;

/// A chat template has tens of kilobytes; a whole tokenizer.json in one string has tens of megabytes.
const MAX_STRING_BYTES: u64 = 64 << 20;
/// The largest vocabularies have 2^18 entries and 2^19 merges.
const MAX_ARRAY_LEN: u64 = 1 << 24;
/// No known key has nested arrays; the limit keeps the recursion shallow.
const MAX_ARRAY_DEPTH: usize = 4;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// An array value, stored in a vector of its element type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Strings(StringArray),
    Arrays(Vec<Array>),
}

/// Many strings in two allocations: all text concatenated, and the end of each string. A vocabulary may have 262,144
/// tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StringArray {
    text: String,
    ends: Vec<usize>,
}

impl StringArray {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.text[start..end])
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let string = &self.text[start..end];
            start = end;
            string
        })
    }

    pub fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len());
    }
}

impl<S: AsRef<str>> FromIterator<S> for StringArray {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> StringArray {
        let mut array = StringArray::default();
        strings.into_iter().for_each(|s| array.push(s.as_ref()));
        array
    }
}

impl Array {
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Strings(v) => v.len(),
            Array::Arrays(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the type in words that fit "found ..." in an error.
    pub fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "an array of u8",
            Array::I8(_) => "an array of i8",
            Array::U16(_) => "an array of u16",
            Array::I16(_) => "an array of i16",
            Array::U32(_) => "an array of u32",
            Array::I32(_) => "an array of i32",
            Array::U64(_) => "an array of u64",
            Array::I64(_) => "an array of i64",
            Array::F32(_) => "an array of f32",
            Array::F64(_) => "an array of f64",
            Array::Bool(_) => "an array of bool",
            Array::Strings(_) => "an array of strings",
            Array::Arrays(_) => "an array of arrays",
        }
    }
}

impl Value {
    /// Returns the type in words that fit "found ..." in an error.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "a u8",
            Value::I8(_) => "an i8",
            Value::U16(_) => "a u16",
            Value::I16(_) => "an i16",
            Value::U32(_) => "a u32",
            Value::I32(_) => "an i32",
            Value::U64(_) => "a u64",
            Value::I64(_) => "an i64",
            Value::F32(_) => "an f32",
            Value::F64(_) => "an f64",
            Value::Bool(_) => "a bool",
            Value::String(_) => "a string",
            Value::Array(array) => array.type_name(),
        }
    }

    /// Reads a type number and a value of that type. `what` names the key in errors.
    pub(crate) fn read(reader: &mut Reader<'_>, what: &dyn Display) -> Result<Value, Error> {
        let kind = reader.u32(&format_args!("the type of {what}"))?;
        Ok(match kind {
            0 => Value::U8(reader.u8(what)?),
            1 => Value::I8(reader.u8(what)? as i8),
            2 => Value::U16(reader.u16(what)?),
            3 => Value::I16(reader.u16(what)? as i16),
            4 => Value::U32(reader.u32(what)?),
            5 => Value::I32(reader.u32(what)? as i32),
            6 => Value::F32(f32::from_bits(reader.u32(what)?)),
            7 => Value::Bool(read_bool(reader.u8(what)?, reader, what)?),
            8 => Value::String(reader.string(MAX_STRING_BYTES, what)?),
            9 => Value::Array(Array::read(reader, what, 1)?),
            10 => Value::U64(reader.u64(what)?),
            11 => Value::I64(reader.u64(what)? as i64),
            12 => Value::F64(f64::from_bits(reader.u64(what)?)),
            _ => return Err(unknown_type(kind, reader, what)),
        })
    }
}

impl Array {
    /// Reads an array, beginning with its element type. `depth` counts this array and those around it.
    fn read(reader: &mut Reader<'_>, what: &dyn Display, depth: usize) -> Result<Array, Error> {
        if depth > MAX_ARRAY_DEPTH {
            let (path, found) = (reader.path().to_path_buf(), depth as u64);
            let what = format!("the nesting of arrays in {what}");
            return Err(Error::TooLarge { path, what, limit: MAX_ARRAY_DEPTH as u64, found });
        }
        let kind = reader.u32(&format_args!("the element type of {what}"))?;
        // Minimum bytes of an element: an empty string has its length, an empty array its type and length.
        let element_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            _ => return Err(unknown_type(kind, reader, what)),
        };
        let count = reader.count(element_bytes, MAX_ARRAY_LEN, &format_args!("the array of {what}"))?;
        Ok(match kind {
            0 => Array::U8(numbers(reader, count, what, u8::from_le_bytes)?),
            1 => Array::I8(numbers(reader, count, what, i8::from_le_bytes)?),
            2 => Array::U16(numbers(reader, count, what, u16::from_le_bytes)?),
            3 => Array::I16(numbers(reader, count, what, i16::from_le_bytes)?),
            4 => Array::U32(numbers(reader, count, what, u32::from_le_bytes)?),
            5 => Array::I32(numbers(reader, count, what, i32::from_le_bytes)?),
            6 => Array::F32(numbers(reader, count, what, f32::from_le_bytes)?),
            7 => {
                let bytes = reader.take(count as u64, what)?;
                Array::Bool(bytes.iter().map(|&b| read_bool(b, reader, what)).collect::<Result<_, _>>()?)
            }
            8 => Array::Strings(read_strings(reader, count, what)?),
            10 => Array::U64(numbers(reader, count, what, u64::from_le_bytes)?),
            11 => Array::I64(numbers(reader, count, what, i64::from_le_bytes)?),
            12 => Array::F64(numbers(reader, count, what, f64::from_le_bytes)?),
            // 9: unknown numbers were refused above.
            _ => Array::Arrays((0..count).map(|_| Array::read(reader, what, depth + 1)).collect::<Result<_, _>>()?),
        })
    }
}

/// Reads `count` numbers of N bytes each. Allocates after checking that the bytes are there.
fn numbers<T, const N: usize>(
    reader: &mut Reader<'_>,
    count: usize,
    what: &dyn Display,
    from_bytes: fn([u8; N]) -> T,
) -> Result<Vec<T>, Error> {
    let bytes = reader.take((count as u64).saturating_mul(N as u64), what)?;
    Ok(bytes.as_chunks::<N>().0.iter().map(|&chunk| from_bytes(chunk)).collect())
}

fn read_strings(reader: &mut Reader<'_>, count: usize, what: &dyn Display) -> Result<StringArray, Error> {
    let mut ends = Vec::with_capacity(count);
    let mut text = Vec::new();
    for index in 0..count {
        let entry = format_args!("entry {index} of {what}");
        let start = text.len();
        text.extend_from_slice(reader.string_bytes(MAX_STRING_BYTES, &entry)?);
        // The copy is validated, not the mapped file, which could change in between.
        std::str::from_utf8(&text[start..]).map_err(|e| reader.not_utf8(e, &entry))?;
        ends.push(text.len());
    }
    // Cannot fail after the checks above. Checking again is simpler than a proof for `unsafe`.
    let text = String::from_utf8(text).map_err(|e| reader.not_utf8(e.utf8_error(), what))?;
    Ok(StringArray { text, ends })
}

fn read_bool(byte: u8, reader: &Reader<'_>, what: &dyn Display) -> Result<bool, Error> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Error::invalid(reader.path(), what, "a bool of 0 or 1", byte)),
    }
}

fn unknown_type(kind: u32, reader: &Reader<'_>, what: &dyn Display) -> Error {
    Error::invalid(reader.path(), format_args!("the type of {what}"), "a GGUF value type from 0 to 12", kind)
}
