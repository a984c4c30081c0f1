//! Reads settings of hybrid models from a Hugging Face `config.json`: the kinds of layers, and limits.

use serde_json::Value;

use super::hugging_face::Fields;
use crate::Error;

impl Fields<'_> {
    /// Returns for each layer what `kinds` gives for its name in a list.
    pub(crate) fn kinds_of_layers<T: Copy>(&self, key: &str, kinds: &[(&str, T)]) -> Result<Option<Vec<T>>, Error> {
        let Some(names) = self.opt_strs(key)? else { return Ok(None) };
        let kind = |name: &&str| {
            let known = kinds.iter().find(|(known, _)| known == name);
            known.map(|(_, kind)| *kind).ok_or_else(|| {
                let all: Vec<&str> = kinds.iter().map(|(name, _)| *name).collect();
                self.bad(key, &all.join(" or "), &Value::from(*name))
            })
        };
        names.iter().map(kind).collect::<Result<_, _>>().map(Some)
    }

    /// Returns a lower and an upper bound. Files may have the latter as a string or an object, because JSON has no
    /// infinity.
    pub(crate) fn opt_limits(&self, key: &str) -> Result<Option<[f32; 2]>, Error> {
        let limit = |value: &Value| {
            let name = value.as_str().or_else(|| value.get("__float__")?.as_str());
            if name == Some("Infinity") { Some(f32::INFINITY) } else { value.as_f64().map(|n| n as f32) }
        };
        let read = |value: &Value| match value.as_array()?.as_slice() {
            [least, most] => Some([limit(least)?, limit(most)?]),
            _ => None,
        };
        self.typed(key, "a smallest and a largest number", read)
    }

    /// Returns the error for a key whose value is not one of the `expected`.
    pub(crate) fn unsupported(&self, key: &str, expected: &str) -> Error {
        self.bad(key, expected, self.get(key).unwrap_or(&Value::Null))
    }
}
