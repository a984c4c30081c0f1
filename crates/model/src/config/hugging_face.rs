//! Reads a Hugging Face `config.json`: typed fields with errors that name the key, and the settings that most families
//! share.
//!
//! There are two layouts: until 2025 `rope_theta` and `rope_scaling` were top-level keys, since then `rope_parameters`
//! holds both.

use std::collections::BTreeMap;

use pellucid_tensor::{Activation, RopeStyle};
use serde_json::Value;

use super::{DecoderConfig, NormKind, Positions, plain_layers};
use crate::Error;
use crate::rope::{
    RopeConfig, RopeScaling, long_rope_attention_factor, scaled_yarn_attention_factor, yarn_attention_factor,
};

/// An object of `config.json`, with its path for error messages: the keys that lead to it, outermost first, the rest
/// empty.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    object: &'a Value,
    path: [&'a str; 3],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Value) -> Self {
        Fields { object, path: [""; 3] }
    }

    /// Returns a key's value; `null` counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether a key is present with the value `null`.
    pub(crate) fn is_null(&self, key: &str) -> bool {
        self.object.get(key).is_some_and(Value::is_null)
    }

    /// Returns a key's full name for messages.
    fn name(&self, key: &str) -> String {
        let outer: String = self.path.iter().filter(|part| !part.is_empty()).map(|part| format!("{part}.")).collect();
        format!("config.json: {outer}{key}")
    }

    pub(super) fn bad(&self, key: &str, expected: &str, found: &Value) -> Error {
        let mut found = found.to_string();
        if let Some((cut, _)) = found.char_indices().nth(80) {
            found.truncate(cut);
            found.push_str("...");
        }
        Error::BadSetting { key: self.name(key), expected: expected.into(), found }
    }

    pub(super) fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.bad(key, expected, value)),
        }
    }

    pub(crate) fn opt_usize(&self, key: &str) -> Result<Option<usize>, Error> {
        // The upper bound keeps every product of two settings within 64 bits.
        let read = |value: &Value| value.as_u64().filter(|&n| n < 1 << 31).map(|n| n as usize);
        self.typed(key, "a whole number from 0 to 2^31 - 1", read)
    }

    pub(crate) fn opt_f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.typed(key, "a number", |value| value.as_f64().map(|n| n as f32))
    }

    pub(crate) fn opt_bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Returns the error for a list that must have at least one entry for each of `num_layers` layers.
    pub(crate) fn bad_list(&self, key: &str, num_layers: usize) -> Error {
        let expected = format!("{num_layers} entries, one for each layer");
        self.bad(key, &expected, self.get(key).unwrap_or(&Value::Null))
    }

    /// Refuses a bool other than `value`, which would change the arithmetic in a way that is not implemented. Absent
    /// counts as `value`.
    pub(crate) fn must_be(&self, key: &str, value: bool) -> Result<(), Error> {
        match self.opt_bool(key)? {
            Some(found) if found != value => Err(self.bad(key, &value.to_string(), &Value::from(found))),
            _ => Ok(()),
        }
    }

    /// Refuses a number other than `value`, which is part of an operation's definition. Absent counts as `value`.
    pub(crate) fn must_equal(&self, key: &str, value: f32) -> Result<(), Error> {
        match self.opt_f32(key)? {
            Some(found) if found != value => Err(self.bad(key, &value.to_string(), &Value::from(found))),
            _ => Ok(()),
        }
    }

    pub(crate) fn opt_str(&self, key: &str) -> Result<Option<&'a str>, Error> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(crate) fn opt_usizes(&self, key: &str) -> Result<Option<Vec<usize>>, Error> {
        let read = |value: &Value| value.as_array()?.iter().map(|n| n.as_u64().map(|n| n as usize)).collect();
        self.typed(key, "a list of whole numbers", read)
    }

    pub(crate) fn opt_strs(&self, key: &str) -> Result<Option<Vec<&'a str>>, Error> {
        let read = |value: &'a Value| value.as_array()?.iter().map(Value::as_str).collect();
        self.typed(key, "a list of strings", read)
    }

    fn f32s(&self, key: &str) -> Result<Vec<f32>, Error> {
        let read = |value: &Value| value.as_array()?.iter().map(|n| n.as_f64().map(|n| n as f32)).collect();
        self.typed(key, "a list of numbers", read)?.ok_or_else(|| self.missing(key))
    }

    /// Returns a nested object.
    pub(crate) fn opt_object(&self, key: &'a str) -> Result<Option<Fields<'a>>, Error> {
        self.typed(key, "an object", |value| value.is_object().then_some(value))
            .map(|object| object.map(|object| Fields { object, path: self.within(key) }))
    }

    pub(crate) fn object(&self, key: &'a str) -> Result<Fields<'a>, Error> {
        self.opt_object(key)?.ok_or_else(|| self.missing(key))
    }

    /// Returns a number that `per_layer_config` gives for a layer. Settings other than `known` are refused there.
    pub(crate) fn opt_of_layer(&self, layer: usize, key: &str, known: &[&str]) -> Result<Option<usize>, Error> {
        let name = "per_layer_config";
        let index = layer.to_string();
        let Some(settings) = self.get(name).and_then(|layers| layers.get(&index)) else { return Ok(None) };
        let settings = settings.as_object().ok_or_else(|| self.bad(name, "an object for each layer", settings))?;
        if let Some((other, value)) = settings.iter().find(|(key, _)| !known.contains(&key.as_str())) {
            return Err(self.bad(&format!("{name}.{layer}.{other}"), "no such setting", value));
        }
        let size = |value: &Value| value.as_u64().filter(|&n| n < 1 << 31).map(|n| n as usize);
        let read = |value: &Value| {
            size(value).ok_or_else(|| self.bad(&format!("{name}.{layer}.{key}"), "a whole number", value))
        };
        settings.get(key).map(read).transpose()
    }

    fn within(&self, key: &'a str) -> [&'a str; 3] {
        let mut path = self.path;
        if let Some(free) = path.iter_mut().find(|part| part.is_empty()) {
            *free = key;
        }
        path
    }

    fn missing(&self, key: &str) -> Error {
        Error::MissingSetting { key: self.name(key) }
    }

    pub(crate) fn usize(&self, key: &str) -> Result<usize, Error> {
        self.opt_usize(key)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn f32(&self, key: &str) -> Result<f32, Error> {
        self.opt_f32(key)?.ok_or_else(|| self.missing(key))
    }
}

/// Returns the context length. YaRN extends the trained length, which some files give as the maximum.
pub(crate) fn extended_len(max_positions: usize, rope: &RopeConfig) -> usize {
    match rope.scaling {
        RopeScaling::Yarn { factor, original_context_len, .. } => {
            max_positions.max((original_context_len * factor) as usize)
        }
        _ => max_positions,
    }
}

/// Reads the configuration of a Llama. The families then set what is different.
pub(crate) fn llama(fields: Fields<'_>) -> Result<DecoderConfig, Error> {
    llama_with_rope(fields, None, 10_000.0)
}

/// Reads the configuration of a Llama that rotates a part of each head unless the file states it: `rotary_factor` of
/// it.
pub(crate) fn llama_with_rotary_factor(fields: Fields<'_>, rotary_factor: f32) -> Result<DecoderConfig, Error> {
    let mut config = llama(fields)?;
    let rotary_size = rotary_size(fields, config.head_size, rotary_factor)?;
    set_rotary_size(&mut config, rotary_size);
    Ok(config)
}

/// Reads the configuration of a Llama whose files may give the number of rotated values of a head under `key`.
pub(crate) fn llama_with_rotary_size(fields: Fields<'_>, default_base: f32, key: &str) -> Result<DecoderConfig, Error> {
    let mut config = llama_with_rope(fields, None, default_base)?;
    if let Some(rotary_size) = fields.opt_usize(key)? {
        set_rotary_size(&mut config, rotary_size);
    }
    Ok(config)
}

fn set_rotary_size(config: &mut DecoderConfig, rotary_size: usize) {
    if let Positions::Rope { tables, .. } = &mut config.positions {
        tables.iter_mut().for_each(|table| table.rotary_size = rotary_size);
    }
}

/// Reads the configuration of a Llama whose rotary base is `default_base` unless the file states it. With `kind`, the
/// file may have rotary settings for each kind of layer, and those of this kind are read.
pub(crate) fn llama_with_rope(
    fields: Fields<'_>,
    kind: Option<&'static str>,
    default_base: f32,
) -> Result<DecoderConfig, Error> {
    let hidden_size = fields.usize("hidden_size")?;
    let num_heads = fields.usize("num_attention_heads")?;
    let head_size = head_size(fields, hidden_size, num_heads)?;
    let rotary_size = rotary_size(fields, head_size, 1.0)?;
    let rope = rope(fields, kind, default_base, rotary_size)?;
    Ok(DecoderConfig {
        hidden_size,
        num_heads,
        num_kv_heads: fields.opt_usize("num_key_value_heads")?.unwrap_or(num_heads),
        head_size,
        mlp_size: mlp_size(fields)?,
        context_len: extended_len(fields.usize("max_position_embeddings")?, &rope),
        norm: NormKind::Rms,
        norm_eps: fields.f32("rms_norm_eps")?,
        positions: Positions::Rope { tables: vec![rope], style: RopeStyle::Half },
        activation: activation(fields, &["hidden_activation", "hidden_act"])?,
        attention_scale: 1.0 / (head_size as f32).sqrt(),
        layers: plain_layers(fields.usize("num_hidden_layers")?),
        ..DecoderConfig::EMPTY
    })
}

/// Returns the width of the MLP; files of models with experts in every layer may state theirs alone.
fn mlp_size(fields: Fields<'_>) -> Result<usize, Error> {
    match fields.opt_usize("intermediate_size")?.or(fields.opt_usize("moe_intermediate_size")?) {
        Some(size) => Ok(size),
        None => Err(fields.missing("intermediate_size")),
    }
}

/// Reads the configuration of a Gemma 3, whose files leave out settings that equal the reference implementation's
/// defaults.
pub(crate) fn gemma3(fields: Fields<'_>) -> Result<DecoderConfig, Error> {
    let head_size = fields.opt_usize("head_dim")?.unwrap_or(256);
    Ok(DecoderConfig {
        hidden_size: fields.opt_usize("hidden_size")?.unwrap_or(2304),
        num_heads: fields.opt_usize("num_attention_heads")?.unwrap_or(8),
        num_kv_heads: fields.opt_usize("num_key_value_heads")?.unwrap_or(4),
        head_size,
        mlp_size: fields.opt_usize("intermediate_size")?.unwrap_or(9216),
        context_len: fields.opt_usize("max_position_embeddings")?.unwrap_or(131_072),
        norm_eps: fields.opt_f32("rms_norm_eps")?.unwrap_or(1e-6),
        positions: Positions::Rope {
            tables: vec![rope(fields, Some("full_attention"), 1_000_000.0, head_size)?],
            style: RopeStyle::Half,
        },
        activation: match fields.get("hidden_activation") {
            Some(_) => activation(fields, &["hidden_activation"])?,
            None => Activation::GeluTanh,
        },
        layers: plain_layers(fields.opt_usize("num_hidden_layers")?.unwrap_or(26)),
        ..DecoderConfig::EMPTY
    })
}

/// Reads the rotary base of Gemma 3's layers with a sliding window.
pub(crate) fn gemma3_sliding_base(fields: Fields<'_>) -> Result<f32, Error> {
    let base = fields.opt_f32("rope_local_base_freq")?.unwrap_or(10_000.0);
    match fields.opt_object("rope_parameters")? {
        Some(kinds) => Ok(kinds.object("sliding_attention")?.opt_f32("rope_theta")?.unwrap_or(base)),
        None => Ok(base),
    }
}

/// Reads the rotary settings of layers with a sliding window: those of `rope_parameters`, or the base alone.
pub(crate) fn sliding_rope(fields: Fields<'_>, default_base: f32, rotary_size: usize) -> Result<RopeConfig, Error> {
    let base = fields.opt_f32("rope_theta")?.unwrap_or(default_base);
    match fields.opt_object("rope_parameters")? {
        Some(kinds) => rope_from(fields, kinds.object("sliding_attention")?, base, rotary_size),
        None => Ok(RopeConfig { base, rotary_size, scaling: RopeScaling::None }),
    }
}

pub(crate) fn head_size(fields: Fields<'_>, hidden_size: usize, num_heads: usize) -> Result<usize, Error> {
    match fields.opt_usize("head_dim")? {
        Some(head_size) => Ok(head_size),
        None if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => Ok(hidden_size / num_heads),
        None => Err(Error::BadSetting {
            key: "config.json: num_attention_heads".into(),
            expected: format!("a divisor of hidden_size ({hidden_size}), or the key head_dim"),
            found: num_heads.to_string(),
        }),
    }
}

/// Returns the number of values of a head that are rotated, by `partial_rotary_factor` or `default_factor`.
fn rotary_size(fields: Fields<'_>, head_size: usize, default_factor: f32) -> Result<usize, Error> {
    let nested = fields.opt_object("rope_parameters")?;
    let nested = nested.map(|rope| rope.opt_f32("partial_rotary_factor")).transpose()?.flatten();
    let factor = nested.or(fields.opt_f32("partial_rotary_factor")?).unwrap_or(default_factor);
    Ok((head_size as f32 * factor) as usize)
}

/// Reads the activation from the first of `keys` that is present.
pub(crate) fn activation(fields: Fields<'_>, keys: &[&str]) -> Result<Activation, Error> {
    for key in keys {
        if let Some(name) = fields.opt_str(key)? {
            let unknown = || fields.bad(key, "silu, gelu, gelu_new, gelu_pytorch_tanh or relu2", &Value::from(name));
            return named_activation(name).ok_or_else(unknown);
        }
    }
    Err(fields.missing(keys[0]))
}

/// Returns the activation that the reference implementation has under a name.
pub(crate) fn named_activation(name: &str) -> Option<Activation> {
    Some(match name {
        "silu" | "swish" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "relu2" => Activation::SquaredRelu,
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
        _ => return None,
    })
}

/// Reads rotary positions in either layout. In the newer one some families have an object for each `kind` of layer.
/// Settings missing there are read from the top level, as the reference implementation does.
pub(crate) fn rope(
    fields: Fields<'_>,
    kind: Option<&'static str>,
    default_base: f32,
    rotary_size: usize,
) -> Result<RopeConfig, Error> {
    let base = fields.opt_f32("rope_theta")?.unwrap_or(default_base);
    let scaling = fields.opt_object("rope_scaling")?;
    let parameters = match (fields.opt_object("rope_parameters")?, kind) {
        (Some(kinds), Some(kind)) => Some(kinds.object(kind)?),
        (parameters, _) => parameters,
    };
    if let (Some(parameters), Some(scaling)) = (parameters, scaling)
        && settings(parameters) != settings(scaling)
    {
        return Err(fields.bad(
            "rope_scaling",
            "the same settings as rope_parameters, or no rope_scaling",
            scaling.object,
        ));
    }
    match parameters.or(scaling) {
        Some(rope) => rope_from(fields, rope, base, rotary_size),
        None => Ok(RopeConfig { base, rotary_size, scaling: RopeScaling::None }),
    }
}

/// Returns the settings of a scaling in a comparable form: `type` counts as `rope_type`, and numbers are compared by
/// value.
fn settings(scaling: Fields<'_>) -> BTreeMap<&str, String> {
    let mut settings = BTreeMap::from([("rope_type", Value::from("default").to_string())]);
    for (key, value) in scaling.object.as_object().into_iter().flatten() {
        let key = if key == "type" { "rope_type" } else { key };
        // The older object does not contain these.
        if !value.is_null() && !["rope_theta", "partial_rotary_factor"].contains(&key) {
            settings.insert(key, value.as_f64().map_or_else(|| value.to_string(), |number| number.to_string()));
        }
    }
    settings
}

fn rope_from(config: Fields<'_>, rope: Fields<'_>, base: f32, rotary_size: usize) -> Result<RopeConfig, Error> {
    let base = rope.opt_f32("rope_theta")?.unwrap_or(base);
    let kind = match rope.opt_str("rope_type")? {
        Some(kind) => kind,
        None => rope.opt_str("type")?.unwrap_or("default"),
    };
    let original_context_len = || -> Result<usize, Error> {
        let key = "original_max_position_embeddings";
        match rope.opt_usize(key)?.or(config.opt_usize(key)?) {
            Some(len) => Ok(len),
            None => config.usize("max_position_embeddings"),
        }
    };
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: rope.f32("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: rope.f32("factor")?,
            low_freq_factor: rope.f32("low_freq_factor")?,
            high_freq_factor: rope.f32("high_freq_factor")?,
            original_context_len: original_context_len()? as f32,
        },
        "yarn" => yarn(rope, original_context_len()?)?,
        "longrope" | "su" => {
            let original = original_context_len()?;
            let stretched = config.usize("max_position_embeddings")?;
            RopeScaling::LongRope {
                short: rope.f32s("short_factor")?,
                long: rope.f32s("long_factor")?,
                original_context_len: original,
                attention_factor: rope
                    .opt_f32("attention_factor")?
                    .unwrap_or_else(|| long_rope_attention_factor(stretched as f32, original as f32)),
            }
        }
        _ => return Err(rope.bad("rope_type", "default, linear, llama3, yarn or longrope", &Value::from(kind))),
    };
    Ok(RopeConfig { base, rotary_size, scaling })
}

fn yarn(rope: Fields<'_>, original_context_len: usize) -> Result<RopeScaling, Error> {
    let factor = rope.f32("factor")?;
    // With both of these, the attention factor is the quotient of two.
    let scales = (rope.opt_f32("mscale")?, rope.opt_f32("mscale_all_dim")?);
    let default_factor = match scales {
        (Some(scale), Some(all_dim)) if scale != 0.0 && all_dim != 0.0 => {
            scaled_yarn_attention_factor(factor, scale) / scaled_yarn_attention_factor(factor, all_dim)
        }
        _ => yarn_attention_factor(factor),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: rope.opt_f32("beta_fast")?.unwrap_or(32.0),
        beta_slow: rope.opt_f32("beta_slow")?.unwrap_or(1.0),
        original_context_len: original_context_len as f32,
        attention_factor: rope.opt_f32("attention_factor")?.unwrap_or(default_factor),
        truncate: rope.opt_bool("truncate")?.unwrap_or(true),
    })
}

/// Returns YaRN's scale of attention scores, for families whose scores have one; 0 without it.
pub(crate) fn yarn_scale_of_scores(fields: Fields<'_>) -> Result<f32, Error> {
    let rope = fields.opt_object("rope_parameters")?.or(fields.opt_object("rope_scaling")?);
    Ok(rope.map(|rope| rope.opt_f32("mscale_all_dim")).transpose()?.flatten().unwrap_or(0.0))
}

/// Returns for each layer whether `layer_types` gives it a sliding window; `None` if the list is absent.
pub(crate) fn sliding_layers(fields: Fields<'_>, num_layers: usize) -> Result<Option<Vec<bool>>, Error> {
    let Some(value) = fields.get("layer_types") else { return Ok(None) };
    let kinds = value.as_array().ok_or_else(|| fields.bad("layer_types", "a list", value))?;
    if kinds.len() != num_layers {
        return Err(fields.bad("layer_types", &format!("{num_layers} entries, one for each layer"), value));
    }
    let sliding = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(fields.bad("layer_types", "sliding_attention or full_attention", kind)),
    };
    kinds.iter().map(sliding).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_base_is_read_from_every_key_that_files_use() {
        let base = |config: Value| rope(Fields::new(&config), None, 10_000.0, 8).unwrap().base;
        assert_eq!(base(json!({})), 10_000.0);
        assert_eq!(base(json!({ "rope_theta": 5e5 })), 5e5);
        assert_eq!(base(json!({ "rope_theta": 5e5, "rope_scaling": { "type": "linear", "factor": 2 } })), 5e5);
        assert_eq!(base(json!({ "rope_theta": 5e5, "rope_parameters": { "rope_type": "default" } })), 5e5);
        assert_eq!(base(json!({ "rope_theta": 5e5, "rope_parameters": { "rope_theta": 1e6 } })), 1e6);
        let gemma3 = json!({
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_parameters": { "full_attention": {}, "sliding_attention": {} }
        });
        let full = rope(Fields::new(&gemma3), Some("full_attention"), 1e6, 8).unwrap().base;
        assert_eq!((full, gemma3_sliding_base(Fields::new(&gemma3)).unwrap()), (5e5, 2e4));
    }

    #[test]
    fn two_scalings_must_be_equal() {
        let read = |scaling: Value| {
            let parameters = json!({ "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6 });
            let config = json!({ "rope_parameters": parameters, "rope_scaling": scaling });
            rope(Fields::new(&config), None, 10_000.0, 8)
        };
        assert!(read(json!(null)).is_ok());
        assert!(read(json!({ "type": "linear", "factor": 8 })).is_ok());
        for other in [json!({ "type": "linear", "factor": 4 }), json!({ "rope_type": "default" }), json!({})] {
            let error = read(other).unwrap_err().to_string();
            assert!(error.contains("config.json: rope_scaling") && error.contains("rope_parameters"), "{error}");
        }
    }
}
