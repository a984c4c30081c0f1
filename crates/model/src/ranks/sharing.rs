//! [`Sharing`]: which rows of each weight a rank has, and the configuration of its part of the model.
//!
//! Query heads are shared out with the KV heads that they read, and heads or channels of a recurrence with their part
//! of its states. The vocabulary and the columns of an MLP, of every expert and of the residual stream are shared out
//! in equal parts. Norms, routers, maps to latents and the embedding table are whole on every rank: they are small, or
//! only read row by row.

use std::ops::Range;

use pellucid_tensor::{DeltaNetShape, Mamba2Shape, ValueHeadOrder};

use super::cut::Cut;
use super::shares::{Shares, WeightRows};
use crate::architectures::Blueprint;
use crate::config::{Experts, KeyHeads, LayerConfig, Mamba2Config, Mixer};
use crate::loader::delta_net::DeltaNetStorage;
use crate::{DecoderConfig, Error};

/// The columns of an activation that ranks share out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Columns {
    /// The output of attention in a layer, by query heads. With latent attention, their values.
    Attended(usize),
    /// The keys, and the values, of the KV heads that this rank's query heads read.
    Keys(usize),
    /// The inputs and outputs of a recurrence, and its heads with a time step each.
    RecurrentInput,
    RecurrentOutput,
    RecurrentHeads,
    /// The inputs of the last map of a layer's dense MLP.
    Mlp(usize),
    SharedExpert,
    /// The inputs of the last map of a selected expert.
    Expert,
    /// The weighted sum of selected experts.
    ExpertOutput,
    /// An update of the residual stream.
    Hidden,
    Logits,
}

/// The shares of one rank.
#[derive(Debug, Clone)]
pub(crate) struct Sharing {
    rank: usize,
    num_ranks: usize,
    /// Query heads, the same in every layer with attention.
    heads: Cut,
    /// For each layer; `None` for one without attention.
    attended: Vec<Option<Shares>>,
    keys: Vec<Option<Shares>>,
    recurrence: Option<Recurrence>,
    /// For each layer; `None` for one without a dense MLP.
    mlp: Vec<Option<Shares>>,
    expert: Option<Shares>,
    expert_output: Shares,
    shared_expert: Option<Shares>,
    hidden: Shares,
    logits: Shares,
}

/// How the layers with a recurrence are shared out. A model has one kind of them.
#[derive(Debug, Clone)]
struct Recurrence {
    inputs: Shares,
    outputs: Shares,
    /// `None` if they have no time step.
    heads: Option<Shares>,
}

impl Sharing {
    /// Returns the shares of a rank. Refuses models that cannot be shared out.
    pub(crate) fn new(blueprint: &Blueprint, rank: usize, num_ranks: usize) -> Result<Sharing, Error> {
        let config = &blueprint.config;
        if num_ranks > 1 && config.predictor.is_some() {
            return Err(refusal(config, "a layer that predicts further tokens (--speculate mtp)"));
        }
        let of = |what: &'static str, total: usize, cut: Option<Cut>| {
            cut.map(Shares::from).ok_or_else(|| too_many(config, num_ranks, what, total))
        };
        let even = |what, total| of(what, total, Cut::even(total, num_ranks));
        let rounded = |what, total| of(what, total, Cut::in_rounded_groups(total, num_ranks));
        let layers = || (0..config.num_layers_with_predictor()).map(|index| (index, config.layer(index)));
        let heads = cut_of_heads(config, num_ranks)?;
        let attended = |(index, layer): (usize, LayerConfig)| {
            let size = config.latent_attention.map_or(config.key_heads(index).head_size, |latent| latent.value_size);
            (layer.mixer == Mixer::Attention).then(|| Shares::from(heads).times(size))
        };
        let keys = |(index, layer): (usize, LayerConfig)| {
            let KeyHeads { num_kv_heads, head_size } = config.key_heads(index);
            let of_rank = |rank| vec![groups_of(&heads.range(rank), config.num_heads / num_kv_heads)];
            let kv_heads = || Shares::new(num_kv_heads, (0..num_ranks).map(of_rank));
            (layer.mixer == Mixer::Attention).then(|| kv_heads().times(head_size))
        };
        let mlp = |(index, layer): (usize, LayerConfig)| {
            let has_dense = layer.has_mlp && (!layer.experts || config.dense_beside_experts);
            has_dense.then(|| rounded("columns of an MLP", config.mlp_size_of(index))).transpose()
        };
        let experts = config.experts;
        let shared = experts.and_then(|experts| experts.shared_mlp_size);
        Ok(Sharing {
            rank,
            num_ranks,
            heads,
            attended: layers().map(attended).collect(),
            keys: layers().map(keys).collect(),
            recurrence: recurrence(blueprint, num_ranks)?,
            mlp: layers().map(mlp).collect::<Result<_, _>>()?,
            expert: experts.map(|experts| rounded("columns of an expert", experts.mlp_size)).transpose()?,
            expert_output: even("outputs of an expert", config.expert_width())?,
            shared_expert: shared.map(|size| rounded("columns of the shared expert", size)).transpose()?,
            hidden: even("columns of the residual stream", config.hidden_size)?,
            logits: even("tokens of the vocabulary", config.vocab_size)?,
        })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    /// Returns how columns are shared out.
    pub(crate) fn shares(&self, columns: Columns) -> &Shares {
        let recurrence = self.recurrence.as_ref();
        let shares = match columns {
            Columns::Attended(layer) => self.attended[layer].as_ref(),
            Columns::Keys(layer) => self.keys[layer].as_ref(),
            Columns::RecurrentInput => recurrence.map(|recurrence| &recurrence.inputs),
            Columns::RecurrentOutput => recurrence.map(|recurrence| &recurrence.outputs),
            Columns::RecurrentHeads => recurrence.and_then(|recurrence| recurrence.heads.as_ref()),
            Columns::Mlp(layer) => self.mlp[layer].as_ref(),
            Columns::SharedExpert => self.shared_expert.as_ref(),
            Columns::Expert => self.expert.as_ref(),
            Columns::ExpertOutput => Some(&self.expert_output),
            Columns::Hidden => Some(&self.hidden),
            Columns::Logits => Some(&self.logits),
        };
        shares.expect("columns that the model has")
    }

    /// Returns the number of columns that this rank has.
    pub(crate) fn num_own(&self, columns: Columns) -> usize {
        self.shares(columns).num_columns(self.rank)
    }

    /// Returns the rows of a weight whose products are these columns.
    pub(crate) fn rows(&self, columns: Columns) -> WeightRows {
        self.rows_of(self.shares(columns))
    }

    fn rows_of(&self, shares: &Shares) -> WeightRows {
        WeightRows { total: shares.total(), own: shares.of(self.rank).to_vec() }
    }

    /// Returns the rows of the norm over the outputs of a Mamba-2 layer: those of this rank's outputs if every rank has
    /// whole groups of `norm_size` outputs, which are normalised together; all rows otherwise, because outputs are then
    /// gathered before the norm.
    pub(crate) fn mamba2_norm_rows(&self, norm_size: usize) -> WeightRows {
        let outputs = self.shares(Columns::RecurrentOutput);
        if outputs.are_groups_of(norm_size) { self.rows_of(outputs) } else { WeightRows::from(outputs.total()) }
    }

    /// Returns the query heads of this rank, in every layer with attention.
    pub(crate) fn heads(&self) -> Range<usize> {
        self.heads.range(self.rank)
    }

    /// Returns the rows of a weight that has `size` rows for each query head.
    pub(crate) fn head_rows(&self, size: usize) -> WeightRows {
        self.rows_of(&Shares::from(self.heads).times(size))
    }

    /// Returns the configuration of this rank's part of the model. Vocabulary and residual stream are those of the
    /// whole.
    pub(crate) fn of_rank(&self, whole: &DecoderConfig) -> DecoderConfig {
        if self.num_ranks == 1 {
            return whole.clone();
        }
        let num_heads = self.heads().len();
        let mut config = DecoderConfig { num_ranks: self.num_ranks, num_heads, ..whole.clone() };
        for (index, layer) in config.layers.iter_mut().enumerate() {
            if layer.mixer == Mixer::Attention {
                let KeyHeads { head_size, .. } = whole.key_heads(index);
                layer.heads =
                    Some(KeyHeads { num_kv_heads: self.num_own(Columns::Keys(index)) / head_size, head_size });
            }
            layer.mlp_size = self.mlp[index].as_ref().map(|_| self.num_own(Columns::Mlp(index)));
        }
        config.experts = whole.experts.map(|experts| Experts {
            mlp_size: self.num_own(Columns::Expert),
            shared_mlp_size: experts.shared_mlp_size.map(|_| self.num_own(Columns::SharedExpert)),
            ..experts
        });
        if self.recurrence.is_some() {
            self.set_recurrence(&mut config);
        }
        config
    }

    /// Gives the recurrence of a configuration the sizes of this rank's part.
    fn set_recurrence(&self, config: &mut DecoderConfig) {
        let [inputs, outputs] =
            [Columns::RecurrentInput, Columns::RecurrentOutput].map(|columns| self.num_own(columns));
        if let Some(convolution) = &mut config.short_convolution {
            convolution.num_channels = outputs;
        }
        if let Some(shape) = &mut config.delta_net {
            // Inputs are queries and keys, of the same size, and as many values as there are outputs.
            shape.num_key_heads = (inputs - outputs) / (2 * shape.key_size);
            shape.num_value_heads = self.num_own(Columns::RecurrentHeads);
        }
        if let Some(Mamba2Config { shape, .. }) = &mut config.mamba2 {
            // Inputs are those of the heads, as many as there are outputs, and B and C of each group.
            shape.num_groups = (inputs - outputs) / (2 * shape.state_size);
            shape.num_heads = self.num_own(Columns::RecurrentHeads);
        }
    }
}

/// Returns the groups of `len` units that a range of units has a part of.
fn groups_of(units: &Range<usize>, len: usize) -> Range<usize> {
    units.start / len..units.end.div_ceil(len)
}

/// Divides the query heads, which are the same in all layers: a rank has whole KV heads with all of their query heads,
/// or a part of the query heads of one. Layers may have different numbers of KV heads.
fn cut_of_heads(config: &DecoderConfig, num_ranks: usize) -> Result<Cut, Error> {
    let layers = (0..config.num_layers_with_predictor()).filter(|&i| config.layer(i).mixer == Mixer::Attention);
    let mut numbers: Vec<usize> = layers.map(|layer| config.key_heads(layer).num_kv_heads).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let num_heads = config.num_heads;
    if num_heads < num_ranks {
        return Err(too_many(config, num_ranks, "query heads", num_heads));
    }
    let is_fit = |cut: &Cut| {
        let fits = |heads: &Range<usize>, len: usize| {
            let is_whole = heads.start.is_multiple_of(len) && heads.end.is_multiple_of(len);
            is_whole || groups_of(heads, len).len() == 1
        };
        let lens = || numbers.iter().map(|number| num_heads / number);
        (0..num_ranks).map(|rank| cut.range(rank)).all(|heads| lens().all(|len| fits(&heads, len)))
    };
    let fewest = *numbers.first().expect("a layer with attention");
    let units = numbers.iter().copied().chain([num_heads]).filter(|units| units.is_multiple_of(fewest));
    let mut cuts = units.filter_map(|units| Cut::groups(fewest, units / fewest, num_heads / units, num_ranks));
    cuts.find(is_fit).ok_or_else(|| refusal(config, "layers with different numbers of KV heads"))
}

/// Divides the layers with a recurrence, if the model has any.
fn recurrence(blueprint: &Blueprint, num_ranks: usize) -> Result<Option<Recurrence>, Error> {
    let Blueprint { config, delta_net: DeltaNetStorage { order, .. }, .. } = blueprint;
    let checked = "checked with the configuration";
    let Some(layer) = config.layers.iter().find(|layer| layer.has_recurrence()) else { return Ok(None) };
    let (divided, what, count) = match layer.mixer {
        Mixer::ShortConvolution => {
            let num_channels = config.short_convolution.expect(checked).num_channels;
            (of_short_convolution(num_channels, num_ranks), "channels of a convolution", num_channels)
        }
        Mixer::DeltaNet => {
            let shape = config.delta_net.expect(checked);
            (of_delta_net(shape, *order, num_ranks), "value heads", shape.num_value_heads)
        }
        Mixer::Mamba2 => {
            let shape = config.mamba2.expect(checked).shape;
            (of_mamba2(shape, num_ranks), "Mamba-2 heads", shape.num_heads)
        }
        Mixer::Attention | Mixer::None => unreachable!("the layer has a recurrence"),
    };
    divided.map(Some).ok_or_else(|| too_many(config, num_ranks, what, count))
}

/// Divides the channels of a short convolution. Its inputs are two gates and the input of each channel.
fn of_short_convolution(num_channels: usize, num_ranks: usize) -> Option<Recurrence> {
    let channels = Shares::from(Cut::in_rounded_groups(num_channels, num_ranks)?);
    Some(Recurrence { inputs: channels.then(&channels).then(&channels), heads: None, outputs: channels })
}

/// Divides a delta net: a rank has whole key heads with all value heads that read them, or a part of the value heads of
/// one. Its own heads have the order of all heads.
fn of_delta_net(shape: DeltaNetShape, order: ValueHeadOrder, num_ranks: usize) -> Option<Recurrence> {
    let DeltaNetShape { num_key_heads, num_value_heads, key_size, value_size, .. } = shape;
    let per_key = shape.values_per_key();
    let cut = Cut::groups(num_key_heads, per_key, 1, num_ranks)?;
    let key_heads = Shares::new(num_key_heads, (0..num_ranks).map(|rank| vec![groups_of(&cut.range(rank), per_key)]));
    let values = |rank: usize| {
        let value_head = |i: usize| order.value_head(shape, i / per_key, i % per_key);
        let mut heads: Vec<usize> = cut.range(rank).map(value_head).collect();
        heads.sort_unstable();
        heads.into_iter().map(|head| head..head + 1).collect()
    };
    let heads = Shares::new(num_value_heads, (0..num_ranks).map(values));
    let (keys, outputs) = (key_heads.times(key_size), heads.times(value_size));
    Some(Recurrence { inputs: keys.then(&keys).then(&outputs), outputs, heads: Some(heads) })
}

/// Divides a Mamba-2 layer: a rank has whole groups of heads, or some heads of one group. Ranks with heads of one group
/// all compute its B and C.
fn of_mamba2(shape: Mamba2Shape, num_ranks: usize) -> Option<Recurrence> {
    let Mamba2Shape { num_heads, head_size, num_groups, state_size, .. } = shape;
    let per_group = num_heads / num_groups;
    let cut = Cut::groups(num_groups, per_group, 1, num_ranks)?;
    let groups = Shares::new(num_groups, (0..num_ranks).map(|rank| vec![groups_of(&cut.range(rank), per_group)]));
    let (heads, group_values) = (Shares::from(cut), groups.times(state_size));
    let outputs = heads.times(head_size);
    Some(Recurrence { inputs: outputs.then(&group_values).then(&group_values), outputs, heads: Some(heads) })
}

fn too_many(config: &DecoderConfig, num_ranks: usize, what: &'static str, count: usize) -> Error {
    Error::TooManyRanks { architecture: config.architecture.clone(), num_ranks, what, count }
}

fn refusal(config: &DecoderConfig, what: &'static str) -> Error {
    Error::NotOnRanks { architecture: config.architecture.clone(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the query heads of each rank, in a model whose layers have these numbers of KV heads.
    fn heads(num_heads: usize, kv_heads: &[usize], num_ranks: usize) -> Result<Vec<Range<usize>>, Error> {
        let layer = |&num_kv_heads: &usize| LayerConfig {
            heads: Some(KeyHeads { num_kv_heads, head_size: 8 }),
            ..LayerConfig::PLAIN
        };
        let layers = kv_heads.iter().map(layer).collect();
        let config = DecoderConfig { num_heads, layers, ..DecoderConfig::EMPTY };
        let cut = cut_of_heads(&config, num_ranks)?;
        Ok((0..num_ranks).map(|rank| cut.range(rank)).collect())
    }

    #[test]
    fn query_heads_are_divided_alike_in_layers_with_different_numbers_of_kv_heads() {
        assert_eq!(heads(32, &[16, 4], 3).unwrap(), [0..16, 16..24, 24..32]);
        assert_eq!(heads(32, &[4, 16, 4], 8).unwrap()[..3], [0..4, 4..8, 8..12], "a fourth of four KV heads, or two");
        assert_eq!(heads(4, &[2, 1], 3).unwrap(), [0..2, 2..3, 3..4]);
        assert_eq!(heads(9, &[3], 4).unwrap(), [0..3, 3..6, 6..8, 8..9]);
        let error = heads(12, &[4, 6], 3).unwrap_err().to_string();
        assert!(error.contains("layers with different numbers of KV heads"), "{error}");
        let error = heads(2, &[2], 3).unwrap_err().to_string();
        assert!(error.contains("cannot share the 2 query heads"), "{error}");
    }
}
