//! Reads the hyperparameters of a GGUF file. All architectures have the same keys, with the architecture's name as
//! prefix.

use pellucid_checkpoint::{Checkpoint, Metadata, Value};
use pellucid_tensor::{Mamba2Shape, RopeStyle, Scoring, quant};

use super::{DecoderConfig, Mamba2Config, NormKind, Positions, plain_layers};
use crate::Error;
use crate::rope::{
    RopeConfig, RopeScaling, long_rope_attention_factor, scaled_yarn_attention_factor, yarn_attention_factor,
};

/// Architectures with layers that have no attention, and so no key heads.
const FAMILIES_WITHOUT_ATTENTION: [&str; 5] = ["lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe"];

/// Architectures with layers that have no MLP, whose width is then 0.
const FAMILIES_WITHOUT_MLP: [&str; 2] = ["nemotron_h", "nemotron_h_moe"];

/// Architectures whose layers may differ in size. They read the lists themselves.
const FAMILIES_WITH_LAYER_SIZES: [&str; 1] = ["gemma4"];

/// The metadata keys under an architecture's prefix.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(metadata: &'a Metadata, prefix: &'a str) -> Self {
        Keys { metadata, prefix }
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub(crate) fn opt_usize(&self, name: &str) -> Result<Option<usize>, Error> {
        Ok(self.metadata.opt_u32(&self.key(name))?.map(|n| n as usize))
    }

    pub(crate) fn opt_f32(&self, name: &str) -> Result<Option<f32>, Error> {
        Ok(self.metadata.opt_f32(&self.key(name))?)
    }

    pub(crate) fn f32(&self, name: &str) -> Result<f32, Error> {
        Ok(self.metadata.f32(&self.key(name))?)
    }

    pub(crate) fn opt_bool(&self, name: &str) -> Result<Option<bool>, Error> {
        Ok(self.metadata.opt_bool(&self.key(name))?)
    }

    pub(crate) fn opt_str(&self, name: &str) -> Result<Option<&'a str>, Error> {
        Ok(self.metadata.opt_str(&self.key(name))?)
    }

    pub(crate) fn usize(&self, name: &str) -> Result<usize, Error> {
        Ok(self.metadata.u32(&self.key(name))? as usize)
    }

    /// Refuses a number other than `value`. Absent counts as `value`.
    pub(crate) fn must_equal(&self, name: &str, value: usize) -> Result<(), Error> {
        match self.opt_usize(name)?.filter(|&found| found != value) {
            None => Ok(()),
            Some(found) => {
                Err(Error::BadSetting { key: self.key(name), expected: value.to_string(), found: found.to_string() })
            }
        }
    }

    /// Refuses a real number other than `value`. Absent counts as `value`.
    pub(crate) fn must_equal_real(&self, name: &str, value: f32) -> Result<(), Error> {
        match self.opt_f32(name)?.filter(|&found| found != value) {
            None => Ok(()),
            Some(found) => {
                Err(Error::BadSetting { key: self.key(name), expected: value.to_string(), found: found.to_string() })
            }
        }
    }

    /// Returns for each layer whether it has a sliding window: from a list of bools, or from a period whose last layer
    /// has none.
    pub(crate) fn sliding_layers(&self, num_layers: usize) -> Result<Option<Vec<bool>>, Error> {
        let key = self.key("attention.sliding_window_pattern");
        if let Ok(Some(period)) = self.metadata.opt_u32(&key) {
            if period == 0 {
                let expected = "a period of 1 or more, or one bool for each layer".into();
                return Err(Error::BadSetting { key, expected, found: "0".into() });
            }
            let period = period as usize;
            return Ok(Some((0..num_layers).map(|layer| !(layer + 1).is_multiple_of(period)).collect()));
        }
        match self.metadata.opt_bools(&key)? {
            Some(list) if list.len() != num_layers => Err(Error::BadSetting {
                key,
                expected: format!("{num_layers} bools, one for each layer"),
                found: list.len().to_string(),
            }),
            list => Ok(list.map(<[bool]>::to_vec)),
        }
    }

    /// Returns for each layer whether it has attention, by the list of its numbers of key heads.
    pub(crate) fn attention_layers(&self, num_layers: usize) -> Result<Vec<bool>, Error> {
        let key = self.key("attention.head_count_kv");
        match self.metadata.opt_u32s(&key)? {
            Some(list) if list.len() == num_layers => Ok(list.into_iter().map(|count| count > 0).collect()),
            found => Err(Error::BadSetting {
                key,
                expected: format!("{num_layers} numbers, one for each layer"),
                found: found.map_or("none".into(), |list| list.len().to_string()),
            }),
        }
    }

    /// Returns for each layer whether it has a recurrence in place of attention, if the file has the list.
    pub(crate) fn recurrent_layers(&self, num_layers: usize) -> Result<Option<Vec<bool>>, Error> {
        let key = self.key("attention.recurrent_layers");
        match self.metadata.opt_bools(&key)? {
            Some(list) if list.len() != num_layers => Err(Error::BadSetting {
                key,
                expected: format!("{num_layers} bools, one for each layer"),
                found: list.len().to_string(),
            }),
            list => Ok(list.map(<[bool]>::to_vec)),
        }
    }

    /// Returns a number for each layer, from a list or from one number for all.
    pub(crate) fn of_layers(&self, name: &str, num_layers: usize) -> Result<Vec<usize>, Error> {
        let key = self.key(name);
        if let Ok(Some(number)) = self.metadata.opt_u32(&key) {
            return Ok(vec![number as usize; num_layers]);
        }
        match self.metadata.opt_u32s(&key)? {
            Some(list) if list.len() == num_layers => Ok(list.into_iter().map(|number| number as usize).collect()),
            found => Err(Error::BadSetting {
                key,
                expected: format!("a number, or {num_layers} numbers, one for each layer"),
                found: found.map_or("none".into(), |list| list.len().to_string()),
            }),
        }
    }

    /// Returns the number of key heads, which is 0 in layers without attention.
    fn kv_heads(&self) -> Result<Option<usize>, Error> {
        let name = "attention.head_count_kv";
        match self.same_where_present(name) {
            Some(count) if FAMILIES_WITHOUT_ATTENTION.contains(&self.prefix) => Ok(Some(count)),
            _ => self.same_for_all_layers(name),
        }
    }

    /// Returns the number of a list with one entry for each layer, all of which are equal or 0.
    fn same_where_present(&self, name: &str) -> Option<usize> {
        let list = self.metadata.opt_u32s(&self.key(name)).ok()??;
        let mut counts = list.iter().filter(|&&count| count > 0);
        counts.next().filter(|first| counts.all(|count| count == *first)).map(|&count| count as usize)
    }

    /// Reads the sizes of Mamba-2 layers. The outputs of each group are normalised together.
    pub(crate) fn mamba2(&self) -> Result<Mamba2Config, Error> {
        let (num_heads, num_groups) = (self.usize("ssm.time_step_rank")?, self.usize("ssm.group_count")?);
        let width = self.usize("ssm.inner_size")?;
        let shape = Mamba2Shape {
            num_heads,
            head_size: width / num_heads.max(1),
            num_groups,
            state_size: self.usize("ssm.state_size")?,
            num_taps: self.usize("ssm.conv_kernel")?,
            norm_size: width / num_groups.max(1),
        };
        Ok(Mamba2Config { shape, time_limits: Mamba2Config::NO_LIMITS })
    }

    /// Returns the width of the MLP; files of models with experts in every layer may state theirs alone.
    fn mlp_size(&self) -> Result<Option<usize>, Error> {
        if let Some(size) = self.same_where_present("feed_forward_length")
            && FAMILIES_WITHOUT_MLP.contains(&self.prefix)
        {
            return Ok(Some(size));
        }
        match self.same_for_all_layers("feed_forward_length") {
            Ok(None) => self.opt_usize("expert_feed_forward_length"),
            size => size,
        }
    }

    /// Returns a number that some files give as a list with one entry for each layer. All entries must be equal.
    fn same_for_all_layers(&self, name: &str) -> Result<Option<usize>, Error> {
        let key = self.key(name);
        match self.metadata.opt_u32(&key) {
            Ok(number) => Ok(number.map(|n| n as usize)),
            Err(wrong_type) => match self.metadata.opt_u32s(&key)? {
                Some(list) if !list.is_empty() && list.iter().all(|n| *n == list[0]) => Ok(Some(list[0] as usize)),
                Some(list) if !list.is_empty() && FAMILIES_WITH_LAYER_SIZES.contains(&self.prefix) => {
                    Ok(Some(list[0] as usize))
                }
                Some(list) => Err(Error::BadSetting {
                    key,
                    expected: "the same number for every layer".into(),
                    found: format!("{list:?}"),
                }),
                None => Err(wrong_type.into()),
            },
        }
    }
}

/// Reads the configuration of a Llama. The families then set what is different.
pub(crate) fn llama(keys: Keys<'_>, checkpoint: &Checkpoint, vocab_size: usize) -> Result<DecoderConfig, Error> {
    let missing = |name: &str| Error::MissingSetting { key: keys.key(name) };
    let hidden_size = keys.usize("embedding_length")?;
    let num_heads = keys.same_for_all_layers("attention.head_count")?.ok_or_else(|| missing("attention.head_count"))?;
    let head_size = match keys.opt_usize("attention.key_length")? {
        Some(size) => size,
        None if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => return Err(missing("attention.key_length")),
    };
    // With latent attention, values are a part of what is stored.
    let has_latents = keys.opt_usize("attention.kv_lora_rank")?.is_some();
    let value_length = keys.opt_usize("attention.value_length")?.filter(|&length| length != head_size && !has_latents);
    if let Some(value_length) = value_length {
        return Err(Error::BadSetting {
            key: keys.key("attention.value_length"),
            expected: format!("{head_size}, the length of keys"),
            found: value_length.to_string(),
        });
    }
    let (norm, norm_eps) = match keys.opt_f32("attention.layer_norm_rms_epsilon")? {
        Some(eps) => (NormKind::Rms, eps),
        None => (
            NormKind::Layer,
            keys.opt_f32("attention.layer_norm_epsilon")?.ok_or_else(|| missing("attention.layer_norm_rms_epsilon"))?,
        ),
    };
    let context_len = keys.usize("context_length")?;
    let rotary_size = keys.opt_usize("rope.dimension_count")?.unwrap_or(head_size);
    let scaling = scaling(keys, checkpoint, context_len)?;
    let base = keys.opt_f32("rope.freq_base")?.unwrap_or(10_000.0);
    Ok(DecoderConfig {
        vocab_size,
        hidden_size,
        num_heads,
        num_kv_heads: keys.kv_heads()?.unwrap_or(num_heads),
        head_size,
        mlp_size: keys.mlp_size()?.ok_or_else(|| missing("feed_forward_length"))?,
        context_len,
        norm,
        norm_eps,
        positions: Positions::Rope { tables: vec![RopeConfig { base, rotary_size, scaling }], style: RopeStyle::Half },
        attention_scale: 1.0 / (head_size as f32).sqrt(),
        layers: plain_layers(keys.usize("block_count")?),
        ..DecoderConfig::EMPTY
    })
}

const LONG_FACTORS: &str = "rope_factors_long.weight";
const SHORT_FACTORS: &str = "rope_factors_short.weight";
const FREQUENCIES: &str = "rope_freqs.weight";

/// Reads the RoPE scaling, from tensors of divisors or from keys. A file with both is refused, because one would be
/// ignored.
fn scaling(keys: Keys<'_>, checkpoint: &Checkpoint, context_len: usize) -> Result<RopeScaling, Error> {
    let alone = |tensor: &str, missing: &str| {
        let (key, expected) = (format!("tensor \"{tensor}\""), format!("the tensor \"{missing}\" as well"));
        Err(Error::BadSetting { key, expected, found: "only this one".into() })
    };
    let by_tensors = match (factors(checkpoint, LONG_FACTORS), factors(checkpoint, SHORT_FACTORS)) {
        (Some(long), Some(short)) => {
            let original = keys.usize("rope.scaling.original_context_length")?;
            let attention_factor = keys
                .opt_f32("rope.scaling.attn_factor")?
                .unwrap_or_else(|| long_rope_attention_factor(context_len as f32, original as f32));
            Some(RopeScaling::LongRope { short, long, original_context_len: original, attention_factor })
        }
        (Some(_), None) => return alone(LONG_FACTORS, SHORT_FACTORS),
        (None, Some(_)) => return alone(SHORT_FACTORS, LONG_FACTORS),
        (None, None) => factors(checkpoint, FREQUENCIES).map(|factors| RopeScaling::Factors { factors }),
    };
    let key = keys.key("rope.scaling.type");
    let kind = keys.metadata.opt_str(&key)?;
    if kind == Some("longrope") {
        return match by_tensors {
            Some(scaling @ RopeScaling::LongRope { .. }) => Ok(scaling),
            _ => {
                let expected = format!("the tensors \"{LONG_FACTORS}\" and \"{SHORT_FACTORS}\" for longrope");
                Err(Error::BadSetting { key, expected, found: "neither of them".into() })
            }
        };
    }
    match (by_tensors, scaling_of_kind(keys, kind, context_len)?) {
        (None, by_keys) => Ok(by_keys),
        (Some(by_tensors), RopeScaling::None | RopeScaling::Linear { factor: 1.0 }) => Ok(by_tensors),
        (Some(_), by_keys) => Err(Error::BadSetting {
            key: keys.key("rope.scaling"),
            expected: "none, because the file has tensors of factors".into(),
            found: format!("{by_keys:?}"),
        }),
    }
}

/// Reads a scaling that is described by keys alone.
fn scaling_of_kind(keys: Keys<'_>, kind: Option<&str>, context_len: usize) -> Result<RopeScaling, Error> {
    let factor = || -> Result<f32, Error> { Ok(keys.metadata.f32(&keys.key("rope.scaling.factor"))?) };
    match kind {
        // Old files have no type; they give linear scaling by `scale_linear`.
        None => match keys.opt_f32("rope.scale_linear")? {
            Some(factor) if factor != 1.0 => Ok(RopeScaling::Linear { factor }),
            _ => Ok(RopeScaling::None),
        },
        Some("none") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: factor()? }),
        Some("yarn") => {
            let factor = factor()?;
            // llama.cpp divides by the factor with this multiplier, if the file has one.
            let multiplier = keys.opt_f32("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
            let default_factor = match multiplier {
                0.0 => yarn_attention_factor(factor),
                scale => yarn_attention_factor(factor) / scaled_yarn_attention_factor(factor, scale),
            };
            Ok(RopeScaling::Yarn {
                factor,
                beta_fast: keys.opt_f32("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: keys.opt_f32("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                original_context_len: keys.opt_usize("rope.scaling.original_context_length")?.unwrap_or(context_len)
                    as f32,
                attention_factor: default_factor * keys.opt_f32("rope.scaling.attn_factor")?.unwrap_or(1.0),
                truncate: true,
            })
        }
        Some(other) => Err(Error::BadSetting {
            key: keys.key("rope.scaling.type"),
            expected: "none, linear, yarn or longrope".into(),
            found: other.into(),
        }),
    }
}

/// Reads a small tensor of divisors, one for each pair of a head.
fn factors(checkpoint: &Checkpoint, name: &str) -> Option<Vec<f32>> {
    let tensor = checkpoint.find_tensor(name)?;
    let mut factors = vec![0.0; tensor.info.num_elements()];
    quant::decode(tensor.info.dtype, &tensor.bytes(), &mut factors);
    Some(factors)
}

/// Refuses keys that would change the arithmetic and that no family reads, unless their value changes nothing. It needs
/// the configuration, because a key may state what the family does anyway.
pub(crate) fn refuse_unread(keys: Keys<'_>, config: &DecoderConfig, num_extra_layers: usize) -> Result<(), Error> {
    let scaling = match &config.positions {
        Positions::Rope { tables, .. } => tables.first().map(|rope| &rope.scaling),
        _ => None,
    };
    let yarn_factor = match scaling {
        Some(RopeScaling::Yarn { attention_factor, .. }) => Some(*attention_factor),
        _ => None,
    };
    let is_yarn = yarn_factor.is_some();
    let reads_factor = is_yarn || matches!(scaling, Some(RopeScaling::LongRope { .. }));
    let normalizes = config.experts.is_none_or(|experts| experts.routing.normalize);
    let scale = config.experts.map_or(1.0, |experts| experts.routing.scale);
    // The numbers of llama.cpp for softmax and sigmoid.
    let gating_func = match config.experts.map(|experts| experts.routing.scoring) {
        Some(Scoring::Sigmoid) => 2,
        _ => 1,
    };
    let shared = config.experts.and_then(|experts| Some(experts.shared_mlp_size? / experts.mlp_size.max(1)));
    let num_shared = shared.unwrap_or(0);
    let num_groups = config.experts.and_then(|experts| experts.routing.groups).map_or(1, |(count, _)| count);
    let num_sharing = config.layers.iter().filter(|layer| layer.kv_from.is_some()).count();
    let num_dense = config.layers.iter().take_while(|layer| config.experts.is_some() && !layer.experts).count();
    let real = |number: Option<f32>| f64::from(number.unwrap_or(0.0));
    // Each key with the values that change nothing. 0 is one of them if llama.cpp treats it as "not given".
    let unread = [
        ("attention.causal", [1.0, 1.0]),
        ("attention.clamp_kqv", [0.0, 0.0]),
        ("attention.max_alibi_bias", [0.0, 0.0]),
        ("attention.output_scale", [0.0, 1.0]),
        ("attention.scale", [0.0, real(Some(config.attention_scale))]),
        ("attention.shared_kv_layers", [0.0, num_sharing as f64]),
        ("attention.temperature_scale", [0.0, 0.0]),
        ("attn_logit_softcapping", [0.0, real(config.attention_soft_cap)]),
        ("embedding_scale", [0.0, real(Some(config.embedding_scale))]),
        ("expert_gating_func", [0.0, f64::from(gating_func)]),
        ("expert_group_count", [f64::from(u8::from(num_groups == 1)), num_groups as f64]),
        ("expert_shared_count", [0.0, num_shared as f64]),
        ("expert_weights_norm", if normalizes { [1.0, 1.0] } else { [0.0, 0.0] }),
        ("expert_weights_scale", [0.0, real(Some(scale))]),
        ("final_logit_softcapping", [0.0, real(config.logits_soft_cap)]),
        ("interleave_moe_layer_step", [0.0, 1.0]),
        ("leading_dense_block_count", [0.0, num_dense as f64]),
        ("logit_scale", [0.0, real(Some(config.logits_divisor))]),
        ("moe_every_n_layers", [0.0, 1.0]),
        ("nextn_predict_layers", [0.0, num_extra_layers as f64]),
        ("residual_scale", [0.0, real(Some(config.residual_scale))]),
        ("router_logit_softcapping", [0.0, 0.0]),
        ("rope.scaling.alpha", [0.0, 1.0]),
        ("rope.scaling.yarn_attn_factor", [1.0, real(yarn_factor.or(Some(1.0)))]),
        ("rope.scaling.yarn_ext_factor", [-1.0, f64::from(u8::from(is_yarn))]),
        ("swin_norm", [0.0, 0.0]),
        ("use_parallel_residual", [0.0, 0.0]),
    ];
    let factor = ("rope.scaling.attn_factor", [1.0, 1.0]);
    for (name, harmless) in unread.into_iter().chain((!reads_factor).then_some(factor)) {
        let has_no_effect = [
            // Limits the context instead.
            ("mistral3", "attention.temperature_scale"),
            // The width of the shared expert has a key of its own.
            ("nemotron-h-moe", "expert_shared_count"),
        ];
        if has_no_effect.contains(&(config.architecture.as_str(), name)) {
            continue;
        }
        let key = keys.key(name);
        let Some(value) = keys.metadata.get(&key) else { continue };
        let found = as_number(value);
        let close = |wanted: f64| found.is_some_and(|found| (found - wanted).abs() <= 1e-5 * wanted.abs());
        if !harmless.into_iter().any(close) {
            let expected = match harmless {
                [a, b] if a == b => format!("{a} or absent, as {} does not read it", config.architecture),
                [a, b] => format!("{a}, {b} or absent, as {} does not read it", config.architecture),
            };
            let found = found.map_or_else(|| "a value that is not a number".to_owned(), |found| found.to_string());
            return Err(Error::BadSetting { key, expected, found });
        }
    }
    Ok(())
}

/// Returns a number, or a bool as 0 or 1.
fn as_number(value: &Value) -> Option<f64> {
    Some(match *value {
        Value::U8(n) => n.into(),
        Value::I8(n) => n.into(),
        Value::U16(n) => n.into(),
        Value::I16(n) => n.into(),
        Value::U32(n) => n.into(),
        Value::I32(n) => n.into(),
        Value::U64(n) => n as f64,
        Value::I64(n) => n as f64,
        Value::F32(n) => n.into(),
        Value::F64(n) => n,
        Value::Bool(is_on) => u8::from(is_on).into(),
        Value::String(_) | Value::Array(_) => return None,
    })
}
