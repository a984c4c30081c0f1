//! Checks a configuration before a decoder is built from it. An error names the setting.

use pellucid_tensor::{DeltaNetShape, Mamba2Shape};

use super::{
    DecoderConfig, KeyHeads, LatentAttention, Mamba2Config, Mixer, NormKind, Positions, ShortConvolutionConfig,
};
use crate::Error;
use crate::rope::RopeScaling;

/// Bounds far above every known model. A file beyond them is damaged, and products of its sizes could overflow.
const MAX_SIZE: usize = 1 << 24;
pub(super) const MAX_LAYERS: usize = 4096;
const MAX_TAPS: usize = 64;
const MAX_RECURRENT_SIZE: usize = 4096;

/// Checks that sizes are in range, and that value heads can be shared out among key heads.
fn check_delta_net(shape: DeltaNetShape) -> Result<(), Error> {
    let DeltaNetShape { num_key_heads, num_value_heads, key_size, value_size, num_taps } = shape;
    let is_size = |size: &usize| (1..=MAX_RECURRENT_SIZE).contains(size);
    let is_good = [num_key_heads, num_value_heads, key_size, value_size].iter().all(is_size)
        && num_value_heads.is_multiple_of(num_key_heads)
        && (2..=MAX_TAPS).contains(&num_taps);
    if is_good {
        return Ok(());
    }
    Err(Error::BadSetting {
        key: "delta nets".into(),
        expected: format!(
            "sizes of 1 to {MAX_RECURRENT_SIZE}, value heads that are a multiple of key heads, 2 to {MAX_TAPS} taps"
        ),
        found: format!("{shape:?}"),
    })
}

/// Checks that sizes are in range, that heads can be shared out among groups and outputs among norms, and that the
/// limits of the time step leave one.
fn check_mamba2(config: Mamba2Config) -> Result<(), Error> {
    let Mamba2Shape { num_heads, head_size, num_groups, state_size, num_taps, norm_size } = config.shape;
    let is_size = |size: &usize| (1..=MAX_RECURRENT_SIZE).contains(size);
    let [least, most] = config.time_limits;
    let is_good = [num_heads, head_size, num_groups, state_size].iter().all(is_size)
        && num_heads.is_multiple_of(num_groups)
        && norm_size > 0
        && (num_heads * head_size).is_multiple_of(norm_size)
        && (2..=MAX_TAPS).contains(&num_taps)
        && least >= 0.0
        && most >= least;
    if is_good {
        return Ok(());
    }
    Err(Error::BadSetting {
        key: "Mamba-2 layers".into(),
        expected: format!(
            "sizes of 1 to {MAX_RECURRENT_SIZE}, heads that are a multiple of groups, norms that divide the outputs, \
             2 to {MAX_TAPS} taps, a largest time step of at least the smallest"
        ),
        found: format!("{config:?}"),
    })
}

impl DecoderConfig {
    /// Checks what the decoder relies on: sizes are in range, divisors are not zero, and settings fit together.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let bad = |key: &str, expected: &str, found: String| {
            Err(Error::BadSetting { key: key.into(), expected: expected.into(), found })
        };
        let sizes = [
            ("vocabulary size", self.vocab_size),
            ("hidden size", self.hidden_size),
            ("number of heads", self.num_heads),
            ("number of kv heads", self.num_kv_heads),
            ("head size", self.head_size),
            ("mlp size", self.mlp_size),
            ("context length", self.context_len),
        ];
        for (key, size) in sizes {
            if size == 0 || size > MAX_SIZE {
                return bad(key, &format!("1 to {MAX_SIZE}"), size.to_string());
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return bad(
                "number of heads",
                &format!("a multiple of {} kv heads", self.num_kv_heads),
                self.num_heads.to_string(),
            );
        }
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return bad("number of layers", &format!("1 to {MAX_LAYERS}"), self.layers.len().to_string());
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return bad("norm epsilon", "above 0 and below 1", self.norm_eps.to_string());
        }
        let factors = [
            ("embedding scale", self.embedding_scale),
            ("attention scale", self.attention_scale),
            ("residual scale", self.residual_scale),
            ("divisor of logits", self.logits_divisor),
        ];
        for (key, factor) in factors {
            if !(factor.is_finite() && factor > 0.0) {
                return bad(key, "a positive number", factor.to_string());
            }
        }
        for (key, cap) in [("attention soft cap", self.attention_soft_cap), ("logits soft cap", self.logits_soft_cap)] {
            if let Some(cap) = cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
                return bad(key, "a positive number", cap.to_string());
            }
        }
        if let Some(layer) = self.layers.iter().find(|layer| layer.window == Some(0)) {
            return bad("sliding window", "at least 1", format!("{:?}", layer.window));
        }
        // The factor is cancelled by the norms that read the stream, and is applied to token embeddings alone.
        let keeps_stream_scaled =
            self.input_norms && matches!(self.positions, Positions::Rope { .. } | Positions::None);
        if self.residual_scale != 1.0 && !keeps_stream_scaled {
            return bad("residual scale", "1 for a model without norms before attention or with added positions", {
                self.residual_scale.to_string()
            });
        }
        if !self.input_norms && self.experts.is_some() {
            return bad("experts", "a norm before them", "norms after attention and MLP alone".into());
        }
        if let Some(experts) = self.experts {
            let selected = experts.routing.num_selected;
            let widths = [Some(experts.mlp_size), experts.shared_mlp_size, self.expert_input_size];
            let is_width_bad = widths.into_iter().flatten().any(|width| width == 0 || width > MAX_SIZE);
            if experts.num_experts == 0 || experts.num_experts > 65_536 || is_width_bad {
                return bad("experts", "1 to 65536 experts of a width above 0", format!("{experts:?}"));
            }
            let (num_groups, used_groups) = experts.routing.groups.unwrap_or((1, 1));
            let are_groups_bad = num_groups == 0
                || used_groups == 0
                || used_groups > num_groups
                || !experts.num_experts.is_multiple_of(num_groups);
            if are_groups_bad {
                let expected = format!("groups that divide {} experts", experts.num_experts);
                return bad("groups of experts", &expected, format!("{used_groups} of {num_groups}"));
            }
            let selectable = experts.num_experts / num_groups * used_groups;
            if selected == 0 || selected > selectable {
                return bad("experts used", &format!("1 to {selectable}"), selected.to_string());
            }
            if !(experts.routing.scale.is_finite() && experts.routing.scale > 0.0) {
                return bad("scale of experts", "a positive number", experts.routing.scale.to_string());
            }
        } else if self.layers.iter().any(|layer| layer.experts) {
            return bad("experts", "their number and width", "none".into());
        }
        self.check_mixers()?;
        self.check_latent_attention()?;
        self.check_layers()?;
        self.check_positions()
    }

    /// Checks the sizes of layers, and the layers whose keys and values others read.
    fn check_layers(&self) -> Result<(), Error> {
        let bad = |key: String, expected: &str, found: String| {
            Err(Error::BadSetting { key, expected: expected.into(), found })
        };
        for (i, layer) in self.layers.iter().enumerate() {
            let KeyHeads { num_kv_heads, head_size } = self.key_heads(i);
            for (what, size) in [("kv heads", num_kv_heads), ("head size", head_size), ("mlp", self.mlp_size_of(i))] {
                if size == 0 || size > MAX_SIZE {
                    return bad(format!("{what} of layer {i}"), &format!("1 to {MAX_SIZE}"), size.to_string());
                }
            }
            if !self.num_heads.is_multiple_of(num_kv_heads) {
                let expected = format!("a divisor of {} heads", self.num_heads);
                return bad(format!("kv heads of layer {i}"), &expected, num_kv_heads.to_string());
            }
            let is_source =
                |&from: &usize| from < i && self.layers[from].has_kv() && self.key_heads(from) == self.key_heads(i);
            if layer.kv_from.is_some_and(|from| !is_source(&from)) {
                let expected = "an earlier layer with heads of the same size that has its own";
                return bad(format!("keys and values of layer {i}"), expected, format!("{:?}", layer.kv_from));
            }
            if layer.mixer == Mixer::None && !layer.has_mlp {
                return bad(format!("layer {i}"), "attention, a recurrence or an MLP", "none of them".into());
            }
            if layer.keys_as_values && !self.value_norm {
                return bad(format!("values of layer {i}"), "a norm, because they are its keys", "none".into());
            }
        }
        let adds_to_stream = self.layer_scales || self.layer_input_size.is_some() || self.dense_beside_experts;
        if adds_to_stream && !(self.output_norms && self.input_norms && self.norm == NormKind::Rms) {
            return bad("norms".into(), "RMSNorm before and after attention and MLP", format!("{:?}", self.norm));
        }
        match self.layer_input_size {
            Some(size) if size == 0 || size * self.num_layers() > MAX_SIZE => {
                bad("input size of a layer".into(), &format!("1 to {MAX_SIZE} for all layers"), size.to_string())
            }
            _ => Ok(()),
        }
    }

    fn check_latent_attention(&self) -> Result<(), Error> {
        let Some(latent) = self.latent_attention else { return Ok(()) };
        let LatentAttention { latent_size, rotary_size, plain_size, value_size, query_rank, yarn_scale } = latent;
        let sizes = [latent_size, rotary_size, plain_size, value_size, query_rank.unwrap_or(1)];
        let is_plain = self.input_norms
            && self.norm == NormKind::Rms
            && self.qk_norm.is_none()
            && !(self.attention_gate || self.attention_sinks || self.value_norm || self.has_state())
            && self.layers.iter().all(|layer| (layer.heads, layer.kv_from, layer.rope) == (None, None, Some(0)));
        if sizes.iter().all(|size| (1..=MAX_SIZE).contains(size)) && yarn_scale.is_finite() && is_plain {
            return Ok(());
        }
        Err(Error::BadSetting {
            key: "latent attention".into(),
            expected: format!("sizes of 1 to {MAX_SIZE}, and no other choices of attention"),
            found: format!("{latent:?}"),
        })
    }

    fn check_mixers(&self) -> Result<(), Error> {
        let bad = |key: &str, expected: &str, found: String| {
            Err(Error::BadSetting { key: key.into(), expected: expected.into(), found })
        };
        if self.num_attention_layers() == 0 {
            return bad("layers with attention", "at least one", "none".into());
        }
        let uses_convolution = self.has_mixer(Mixer::ShortConvolution);
        match self.delta_net {
            Some(shape) => check_delta_net(shape)?,
            None if self.has_mixer(Mixer::DeltaNet) => return bad("delta nets", "their sizes", "none".into()),
            None => {}
        }
        match self.mamba2 {
            Some(config) => check_mamba2(config)?,
            None if self.has_mixer(Mixer::Mamba2) => return bad("Mamba-2 layers", "their sizes", "none".into()),
            None => {}
        }
        for (mixer, what) in [(Mixer::DeltaNet, "delta nets"), (Mixer::Mamba2, "Mamba-2 layers")] {
            if self.has_mixer(mixer) && !self.input_norms {
                return bad(what, "a norm before them", "norms after attention and MLP alone".into());
            }
        }
        match self.short_convolution {
            Some(ShortConvolutionConfig { num_taps, .. }) if !(2..=MAX_TAPS).contains(&num_taps) => {
                bad("positions of a convolution", &format!("2 to {MAX_TAPS}"), num_taps.to_string())
            }
            None if uses_convolution => bad("positions of a convolution", "their number", "none".into()),
            _ if uses_convolution && !self.input_norms => {
                bad("short convolutions", "a norm before them", "norms after attention and MLP alone".into())
            }
            _ => Ok(()),
        }
    }

    fn check_positions(&self) -> Result<(), Error> {
        let Positions::Rope { tables, .. } = &self.positions else { return Ok(()) };
        let largest_head = (0..self.layers.len()).map(|layer| self.key_heads(layer).head_size).max().unwrap_or(0);
        for rope in tables {
            let bad = |expected: String, found: String| {
                Err(Error::BadSetting { key: "rotary positions".into(), expected, found })
            };
            // Before frequencies are computed: a damaged file names more pairs than fit into memory.
            if rope.rotary_size == 0 || !rope.rotary_size.is_multiple_of(2) || rope.rotary_size > largest_head {
                let expected = format!("an even rotary size from 2 to {largest_head}, the size of a head");
                return bad(expected, rope.rotary_size.to_string());
            }
            if !(rope.base.is_finite() && rope.base > 0.0) {
                return bad("a positive base".into(), rope.base.to_string());
            }
            let lists: &[&Vec<f32>] = match &rope.scaling {
                RopeScaling::Factors { factors } => &[factors],
                RopeScaling::LongRope { short, long, .. } => &[short, long],
                _ => &[],
            };
            if let Some(list) = lists.iter().find(|list| list.len() != rope.rotary_size / 2) {
                let expected = format!("{} factors, one for each pair", rope.rotary_size / 2);
                return bad(expected, list.len().to_string());
            }
            let made = rope.frequencies(self.context_len);
            if !(made.factor.is_finite() && made.frequencies.iter().all(|frequency| frequency.is_finite())) {
                return bad("finite frequencies".into(), format!("{:?}", rope.scaling));
            }
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let Some(table) = layer.rope else { continue };
            let missing = || Error::MissingSetting { key: "rotary positions of a layer".into() };
            let (rotary_size, head_size) =
                (tables.get(table).ok_or_else(missing)?.rotary_size, self.key_heads(i).head_size);
            if rotary_size > head_size {
                let expected = format!("an even rotary size up to {head_size}");
                return Err(Error::BadSetting {
                    key: "rotary positions".into(),
                    expected,
                    found: rotary_size.to_string(),
                });
            }
        }
        Ok(())
    }
}
