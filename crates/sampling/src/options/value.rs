//! The value of an option: owned as a user gave it, borrowed as [`SamplingParams`](crate::SamplingParams) holds it.

use std::fmt;

use crate::StepKind;

/// Value to set an option to.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Number(f32),
    Count(u32),
    Seed(u64),
    TokenBias(Vec<(u32, f32)>),
    Tokens(Vec<u32>),
    /// Texts before tokenization; [`GivenOptions::apply`](crate::GivenOptions::apply) turns them into token sequences.
    Texts(Vec<String>),
    Sequences(Vec<Vec<u32>>),
    Steps(Vec<StepKind>),
}

/// Value that an option has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ValueRef<'a> {
    Number(f32),
    Count(u32),
    Seed(u64),
    TokenBias(&'a [(u32, f32)]),
    Tokens(&'a [u32]),
    Sequences(&'a [Vec<u32>]),
    Steps(&'a [StepKind]),
}

impl fmt::Display for ValueRef<'_> {
    /// Numbers as they are typed, lists by their length; an empty list is "none".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = match self {
            ValueRef::Number(value) => return write!(f, "{value}"),
            ValueRef::Count(value) => return write!(f, "{value}"),
            ValueRef::Seed(value) => return write!(f, "{value}"),
            ValueRef::TokenBias(list) => list.len(),
            ValueRef::Tokens(list) => list.len(),
            ValueRef::Sequences(list) => list.len(),
            ValueRef::Steps(list) => list.len(),
        };
        if len == 0 { f.write_str("none") } else { write!(f, "{len} entries") }
    }
}

/// A type that a field of `SamplingParams` can have.
pub(super) trait Field {
    /// `None` for an optional field that is not set.
    fn read(&self) -> Option<ValueRef<'_>>;

    /// Returns false when the value has another type.
    fn write(&mut self, value: Value) -> bool;
}

/// Implements [`Field`] for a type and for its `Option`.
macro_rules! field {
    ($type:ty, $variant:ident, |$field:ident| $borrow:expr) => {
        impl Field for $type {
            fn read(&self) -> Option<ValueRef<'_>> {
                let $field = self;
                Some(ValueRef::$variant($borrow))
            }

            fn write(&mut self, value: Value) -> bool {
                let Value::$variant(value) = value else { return false };
                *self = value;
                true
            }
        }

        impl Field for Option<$type> {
            fn read(&self) -> Option<ValueRef<'_>> {
                self.as_ref().and_then(Field::read)
            }

            fn write(&mut self, value: Value) -> bool {
                let Value::$variant(value) = value else { return false };
                *self = Some(value);
                true
            }
        }
    };
}

field!(f32, Number, |value| *value);
field!(u32, Count, |value| *value);
field!(u64, Seed, |value| *value);
field!(Vec<(u32, f32)>, TokenBias, |list| list);
field!(Vec<u32>, Tokens, |list| list);
field!(Vec<Vec<u32>>, Sequences, |list| list);
field!(Vec<StepKind>, Steps, |list| list);
