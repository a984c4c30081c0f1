//! The keys and values of a GGUF file, with getters whose errors name the key that is missing or has another type.
//!
//! Writers use integers of different widths, so an integer getter accepts every integer type and refuses a value that
//! does not fit. A float is never converted to an integer, nor the other way round.

use std::collections::HashMap;

use super::value::{Array, StringArray, Value};
use crate::error::{Error, quote};

/// All keys of a GGUF file, in file order. Keys are unique.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

/// Defines getters of required keys. Each calls its optional counterpart, and an absent key is [`Error::MissingKey`].
macro_rules! required {
    ($($name:ident from $optional:ident -> $type:ty;)*) => {$(
        pub fn $name(&self, key: &str) -> Result<$type, Error> {
            self.$optional(key)?.ok_or_else(|| Error::MissingKey { key: quote(key) })
        }
    )*};
}

impl Metadata {
    /// Adds a key. Returns false, and changes nothing, if the key is there already.
    pub fn insert(&mut self, key: String, value: Value) -> bool {
        if self.by_key.contains_key(&key) {
            return false;
        }
        self.by_key.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        true
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&index| &self.entries[index].1)
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    required! {
        str from opt_str -> &str;
        bool from opt_bool -> bool;
        u32 from opt_u32 -> u32;
        u64 from opt_u64 -> u64;
        f32 from opt_f32 -> f32;
        strings from opt_strings -> &StringArray;
        u32s from opt_u32s -> Vec<u32>;
        i32s from opt_i32s -> Vec<i32>;
        f32s from opt_f32s -> Vec<f32>;
        bools from opt_bools -> &[bool];
    }

    pub fn opt_str(&self, key: &str) -> Result<Option<&str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(string)) => Ok(Some(string)),
            Some(other) => Err(wrong_type(key, "a string", other.type_name())),
        }
    }

    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(key, "a bool", other.type_name())),
        }
    }

    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.opt_integer(key, "an integer from 0 to 2^32 - 1")
    }

    pub fn opt_u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.opt_integer(key, "an integer from 0 to 2^64 - 1")
    }

    /// Returns a float. An f64 is rounded to the nearest f32.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::F32(value)) => Ok(Some(*value)),
            Some(Value::F64(value)) => Ok(Some(*value as f32)),
            Some(other) => Err(wrong_type(key, "a float", other.type_name())),
        }
    }

    pub fn opt_strings(&self, key: &str) -> Result<Option<&StringArray>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Strings(strings))) => Ok(Some(strings)),
            Some(other) => Err(wrong_type(key, "an array of strings", other.type_name())),
        }
    }

    pub fn opt_u32s(&self, key: &str) -> Result<Option<Vec<u32>>, Error> {
        self.opt_integers(key, "an array of integers from 0 to 2^32 - 1")
    }

    pub fn opt_i32s(&self, key: &str) -> Result<Option<Vec<i32>>, Error> {
        self.opt_integers(key, "an array of integers from -2^31 to 2^31 - 1")
    }

    /// Returns an array of floats. Elements of type f64 are rounded to the nearest f32.
    pub fn opt_f32s(&self, key: &str) -> Result<Option<Vec<f32>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::F32(values))) => Ok(Some(values.clone())),
            Some(Value::Array(Array::F64(values))) => Ok(Some(values.iter().map(|&v| v as f32).collect())),
            Some(other) => Err(wrong_type(key, "an array of floats", other.type_name())),
        }
    }

    pub fn opt_bools(&self, key: &str) -> Result<Option<&[bool]>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Bool(values))) => Ok(Some(values)),
            Some(other) => Err(wrong_type(key, "an array of bools", other.type_name())),
        }
    }

    fn opt_integer<T: TryFrom<i128>>(&self, key: &str, expected: &'static str) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let integer = match *value {
            Value::U8(v) => i128::from(v),
            Value::I8(v) => i128::from(v),
            Value::U16(v) => i128::from(v),
            Value::I16(v) => i128::from(v),
            Value::U32(v) => i128::from(v),
            Value::I32(v) => i128::from(v),
            Value::U64(v) => i128::from(v),
            Value::I64(v) => i128::from(v),
            _ => return Err(wrong_type(key, expected, value.type_name())),
        };
        T::try_from(integer).map(Some).map_err(|_| wrong_type(key, expected, &integer.to_string()))
    }

    fn opt_integers<T: TryFrom<i128>>(&self, key: &str, expected: &'static str) -> Result<Option<Vec<T>>, Error> {
        let array = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(array)) => array,
            Some(other) => return Err(wrong_type(key, expected, other.type_name())),
        };
        match array {
            Array::U8(v) => convert(key, expected, v),
            Array::I8(v) => convert(key, expected, v),
            Array::U16(v) => convert(key, expected, v),
            Array::I16(v) => convert(key, expected, v),
            Array::U32(v) => convert(key, expected, v),
            Array::I32(v) => convert(key, expected, v),
            Array::U64(v) => convert(key, expected, v),
            Array::I64(v) => convert(key, expected, v),
            _ => Err(wrong_type(key, expected, array.type_name())),
        }
        .map(Some)
    }
}

fn convert<T: TryFrom<i128>, U: Copy + Into<i128>>(
    key: &str,
    expected: &'static str,
    integers: &[U],
) -> Result<Vec<T>, Error> {
    let convert_one = |(index, &integer): (usize, &U)| {
        let integer: i128 = integer.into();
        T::try_from(integer).map_err(|_| wrong_type(key, expected, &format!("{integer} as entry {index}")))
    };
    integers.iter().enumerate().map(convert_one).collect()
}

fn wrong_type(key: &str, expected: &'static str, found: &str) -> Error {
    Error::KeyType { key: quote(key), expected, found: found.into() }
}
