//! [`Sharing`]: which rows of each weight a rank has, and the configuration of its part of the model.
//!
//! Query heads are shared out with the KV heads that they read; the columns of an MLP, of every expert and of the
//! residual stream, and the vocabulary, in equal parts. Norms, routers and the embedding table are whole on every rank:
//! they are small, or only read row by row.

use std::ops::Range;

use super::cut::Cut;
use crate::config::{Experts, KeyHeads, LayerConfig, Mixer, MlpKind, QkNorm};
use crate::{DecoderConfig, Error};

/// The columns of an activation that ranks share out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Columns {
    /// The output of attention in a layer.
    Attended(usize),
    /// The inputs of the last map of a layer's dense MLP.
    Mlp(usize),
    SharedExpert,
    /// The inputs of the last map of a selected expert.
    Expert,
    /// An update of the residual stream.
    Hidden,
    Logits,
}

/// The rows of a weight in the file, and those that this rank has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WeightRows {
    pub(crate) total: usize,
    pub(crate) own: Range<usize>,
}

impl From<usize> for WeightRows {
    /// All rows: a weight that is whole on every rank.
    fn from(total: usize) -> Self {
        WeightRows { total, own: 0..total }
    }
}

/// The shares of one rank.
#[derive(Debug, Clone)]
pub(crate) struct Sharing {
    rank: usize,
    num_ranks: usize,
    /// For each layer; `None` for one without attention.
    queries: Vec<Option<Cut>>,
    /// For each layer; `None` for one without a dense MLP.
    mlp: Vec<Option<Cut>>,
    expert: Option<Cut>,
    shared_expert: Option<Cut>,
    hidden: Cut,
    logits: Cut,
}

impl Sharing {
    /// Returns the shares of a rank. Refuses models that cannot be shared out.
    pub(crate) fn new(config: &DecoderConfig, rank: usize, num_ranks: usize) -> Result<Sharing, Error> {
        if num_ranks > 1 {
            check(config)?;
        }
        let too_many = |what: &'static str, count: usize| Error::TooManyRanks {
            architecture: config.architecture.clone(),
            num_ranks,
            what,
            count,
        };
        let even = |what, total| Cut::even(total, num_ranks).ok_or_else(|| too_many(what, total));
        let rounded = |what, total| Cut::in_rounded_groups(total, num_ranks).ok_or_else(|| too_many(what, total));
        let layers = || (0..config.num_layers_with_predictor()).map(|index| (index, config.layer(index)));
        let queries = |(index, layer): (usize, LayerConfig)| {
            if layer.mixer != Mixer::Attention {
                return Ok(None);
            }
            let KeyHeads { num_kv_heads, head_size } = config.key_heads(index);
            let cut = Cut::groups(num_kv_heads, config.num_heads / num_kv_heads, head_size, num_ranks);
            cut.map(Some).ok_or_else(|| too_many("query heads", config.num_heads))
        };
        let mlp = |(index, layer): (usize, LayerConfig)| {
            let has_dense = layer.has_mlp && (!layer.experts || config.dense_beside_experts);
            has_dense.then(|| rounded("columns of an MLP", config.mlp_size_of(index))).transpose()
        };
        let experts = config.experts;
        let shared = experts.and_then(|experts| experts.shared_mlp_size);
        let sharing = Sharing {
            rank,
            num_ranks,
            queries: layers().map(queries).collect::<Result<_, _>>()?,
            mlp: layers().map(mlp).collect::<Result<_, _>>()?,
            expert: experts.map(|experts| rounded("columns of an expert", experts.mlp_size)).transpose()?,
            shared_expert: shared.map(|size| rounded("columns of the shared expert", size)).transpose()?,
            hidden: even("columns of the residual stream", config.hidden_size)?,
            logits: even("tokens of the vocabulary", config.vocab_size)?,
        };
        sharing.check_heads(config)?;
        Ok(sharing)
    }

    /// Refuses layers whose heads would be shared out differently: a rank has the same query heads in every layer.
    fn check_heads(&self, config: &DecoderConfig) -> Result<(), Error> {
        let heads = |(layer, cut): (usize, &Option<Cut>), rank: usize| {
            let head_size = config.key_heads(layer).head_size;
            cut.map(|cut| cut.range(rank)).map(|range| range.start / head_size..range.end / head_size)
        };
        for rank in 0..self.num_ranks {
            let mut of_layers = self.queries.iter().enumerate().filter_map(|layer| heads(layer, rank));
            let first = of_layers.next();
            if of_layers.any(|heads| Some(heads) != first) {
                return Err(refusal(config, "layers with different numbers of KV heads"));
            }
        }
        Ok(())
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    /// Returns how columns are shared out.
    pub(crate) fn cut(&self, columns: Columns) -> Cut {
        let cut = match columns {
            Columns::Attended(layer) => self.queries[layer],
            Columns::Mlp(layer) => self.mlp[layer],
            Columns::SharedExpert => self.shared_expert,
            Columns::Expert => self.expert,
            Columns::Hidden => Some(self.hidden),
            Columns::Logits => Some(self.logits),
        };
        cut.expect("columns that the model has")
    }

    /// Returns the rows of a weight whose products are these columns.
    pub(crate) fn rows(&self, columns: Columns) -> WeightRows {
        let cut = self.cut(columns);
        WeightRows { total: cut.total(), own: cut.range(self.rank) }
    }

    /// Returns the query heads of this rank in a layer.
    pub(crate) fn heads(&self, config: &DecoderConfig, layer: usize) -> Range<usize> {
        let (own, size) = (self.rows(Columns::Attended(layer)).own, config.key_heads(layer).head_size);
        own.start / size..own.end / size
    }

    /// Returns the rows of the maps to keys and to values: those of the KV heads that this rank's query heads read.
    pub(crate) fn key_rows(&self, config: &DecoderConfig, layer: usize) -> WeightRows {
        let KeyHeads { num_kv_heads, head_size } = config.key_heads(layer);
        let heads = self.kv_heads(config, layer);
        WeightRows { total: num_kv_heads * head_size, own: heads.start * head_size..heads.end * head_size }
    }

    fn kv_heads(&self, config: &DecoderConfig, layer: usize) -> Range<usize> {
        let heads_per_kv_head = config.num_heads / config.key_heads(layer).num_kv_heads;
        let heads = self.heads(config, layer);
        heads.start / heads_per_kv_head..heads.end.div_ceil(heads_per_kv_head)
    }

    /// Returns the configuration of this rank's part of the model. Vocabulary and residual stream are those of the
    /// whole.
    pub(crate) fn of_rank(&self, whole: &DecoderConfig) -> DecoderConfig {
        if self.num_ranks == 1 {
            return whole.clone();
        }
        let mut config = DecoderConfig { num_ranks: self.num_ranks, ..whole.clone() };
        let own = |columns: Columns| self.rows(columns).own.len();
        for (index, layer) in config.layers.iter_mut().enumerate() {
            if layer.mixer == Mixer::Attention {
                let KeyHeads { head_size, .. } = whole.key_heads(index);
                layer.heads = Some(KeyHeads { num_kv_heads: self.kv_heads(whole, index).len(), head_size });
                config.num_heads = self.heads(whole, index).len();
            }
            layer.mlp_size = self.mlp[index].map(|_| own(Columns::Mlp(index)));
        }
        config.experts = whole.experts.map(|experts| Experts {
            mlp_size: own(Columns::Expert),
            shared_mlp_size: experts.shared_mlp_size.map(|_| own(Columns::SharedExpert)),
            ..experts
        });
        config
    }
}

/// Refuses models with parts that ranks cannot share out.
fn check(config: &DecoderConfig) -> Result<(), Error> {
    let refused = [
        (config.has_state(), "recurrent layers"),
        (config.latent_attention.is_some(), "latent attention"),
        (config.qk_norm == Some(QkNorm::Row), "norms over the queries of all heads"),
        (config.attention_gate, "gates of the output of attention"),
        (config.experts.is_some() && config.dense_beside_experts, "a dense MLP beside experts"),
        (config.experts.is_some() && config.mlp == MlpKind::Plain, "experts without gates"),
        (config.expert_input_size.is_some(), "experts that read a projection"),
        (config.predictor.is_some(), "a layer that predicts further tokens (--speculate mtp)"),
    ];
    match refused.into_iter().find(|(has, _)| *has) {
        Some((_, what)) => Err(refusal(config, what)),
        None => Ok(()),
    }
}

fn refusal(config: &DecoderConfig, what: &'static str) -> Error {
    Error::NotOnRanks { architecture: config.architecture.clone(), what }
}
