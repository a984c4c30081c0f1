//! The weights of a decoder, under the names that the arithmetic uses.

use pellucid_tensor::{GatedMlp, Linear, PlainMlp, Tensor, ValueHeadOrder};

use crate::DecoderConfig;

/// Minimum cost of one token, which a benchmark compares a step with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenCost {
    /// Bytes of weights that a step of one token reads, in the format in which they are stored.
    pub weight_bytes: u64,
    /// Number of products of a weight and an activation, which is half the number of floating-point operations.
    /// Attention is not included.
    pub products: u64,
}

/// All weights of a decoder. They never change after loading.
#[derive(Debug)]
pub(crate) struct Weights {
    /// `[vocabulary][hidden]`
    pub(crate) embedding: Tensor,
    /// `[context][hidden]`, for learned and sinusoidal positions.
    pub(crate) positions: Option<Tensor>,
    pub(crate) layer_inputs: Option<LayerInputTables>,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: Norm,
    /// `[vocabulary][hidden]`; packed from the embedding table if the model has no output projection.
    pub(crate) output: Linear,
    pub(crate) predictor: Option<PredictorWeights>,
}

/// Weights of the layer that predicts the token after the next. Embedding and output projection are the decoder's.
#[derive(Debug)]
pub(crate) struct PredictorWeights {
    pub(crate) embedding_norm: Norm,
    pub(crate) hidden_norm: Norm,
    /// The map of both to the residual stream: its columns for the embedding, and those for the hidden row.
    pub(crate) from_embedding: Linear,
    pub(crate) from_hidden: Linear,
    pub(crate) layer: LayerWeights,
    pub(crate) output_norm: Norm,
}

#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) attention_norm: Option<Norm>,
    /// `None` if the layer has an MLP alone.
    pub(crate) mixer: Option<MixerWeights>,
    pub(crate) attention_output_norm: Option<Norm>,
    pub(crate) mlp_norm: Option<Norm>,
    /// `None` if the layer has a mixer alone.
    pub(crate) mlp: Option<MlpWeights>,
    pub(crate) mlp_output_norm: Option<Norm>,
    pub(crate) input: Option<LayerInputWeights>,
    /// Factor of the residual stream after the layer.
    pub(crate) scale: Option<f32>,
}

/// Weights from which the inputs of all layers are computed.
#[derive(Debug)]
pub(crate) struct LayerInputTables {
    /// `[vocabulary][layers * size]`
    pub(crate) table: Tensor,
    /// From the hidden size to `layers * size`.
    pub(crate) projection: Linear,
    /// Of the projection to one layer, times [`SUM_SCALE`](crate::layer_input::SUM_SCALE).
    pub(crate) norm: Norm,
}

/// Weights that use the input of one layer.
#[derive(Debug)]
pub(crate) struct LayerInputWeights {
    pub(crate) gate: Linear,
    pub(crate) projection: Linear,
    pub(crate) norm: Norm,
}

#[derive(Debug)]
pub(crate) enum MixerWeights {
    Attention(Box<AttentionWeights>),
    LatentAttention(Box<LatentAttentionWeights>),
    ShortConvolution(Box<ShortConvolutionWeights>),
    DeltaNet(Box<DeltaNetWeights>),
    Mamba2(Box<Mamba2Weights>),
}

#[derive(Debug)]
pub(crate) struct Mamba2Weights {
    /// Inputs of the heads, B and C.
    pub(crate) input: Linear,
    /// Gate of the output.
    pub(crate) gate: Linear,
    /// Time step, for each head.
    pub(crate) time_step: Linear,
    pub(crate) time_bias: Tensor,
    /// Rate of the decay, for each head; negative.
    pub(crate) decay: Tensor,
    /// Factor of each head's inputs in its outputs.
    pub(crate) skip: Tensor,
    /// `[taps][channels]`, the oldest position first.
    pub(crate) taps: Tensor,
    pub(crate) bias: Option<Tensor>,
    /// RMSNorm of the gated outputs, a weight for each of them. If it spans the outputs of several ranks, it is whole
    /// on each of them.
    pub(crate) norm: Tensor,
    pub(crate) output: Linear,
}

#[derive(Debug)]
pub(crate) struct DeltaNetWeights {
    /// Queries, keys and values.
    pub(crate) input: Linear,
    /// Gate of the output.
    pub(crate) gate: Linear,
    /// Strength of writing, for each value head.
    pub(crate) beta: Linear,
    /// Time step of the decay, for each value head.
    pub(crate) time_step: Linear,
    pub(crate) time_bias: Tensor,
    /// Rate of the decay, for each value head; negative.
    pub(crate) decay: Tensor,
    /// `[taps][channels]`, the oldest position first.
    pub(crate) taps: Tensor,
    /// RMSNorm of each value head's output.
    pub(crate) norm: Tensor,
    pub(crate) output: Linear,
    pub(crate) order: ValueHeadOrder,
}

#[derive(Debug)]
pub(crate) struct ShortConvolutionWeights {
    /// The gates of the input and of the output, and the input.
    pub(crate) input: Linear,
    /// `[taps][hidden]`, the oldest position first.
    pub(crate) taps: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) output: Linear,
}

#[derive(Debug)]
pub(crate) struct AttentionWeights {
    pub(crate) query: Linear,
    /// `None` if the layer reads the keys and values of another.
    pub(crate) key: Option<Linear>,
    /// `None` if the layer has no keys, or if they are its values.
    pub(crate) value: Option<Linear>,
    pub(crate) output: Linear,
    /// Gate of the attended values, before the output projection.
    pub(crate) gate: Option<Linear>,
    /// One weight for each value of a head, or for each value of a row.
    pub(crate) query_norm: Option<Norm>,
    pub(crate) key_norm: Option<Norm>,
    /// Ones: the norm of each head's value has no weight.
    pub(crate) value_norm: Option<Norm>,
    /// A score for each head.
    pub(crate) sinks: Option<Tensor>,
}

#[derive(Debug)]
pub(crate) struct LatentAttentionWeights {
    /// Map to the rank of queries, and the norm after it; `None` if queries have one matrix.
    pub(crate) query_rank: Option<(Linear, Norm)>,
    /// Maps to the parts of all heads' queries that are not rotated, and to those that are.
    pub(crate) plain_query: Linear,
    pub(crate) rotary_query: Linear,
    pub(crate) latent: Linear,
    pub(crate) rotary_key: Linear,
    pub(crate) latent_norm: Norm,
    /// For each head, `[latent][plain]`: the transposed map from latents to keys.
    pub(crate) key_maps: Vec<Linear>,
    /// For each head, `[value][latent]`.
    pub(crate) value_maps: Vec<Linear>,
    pub(crate) output: Linear,
}

#[derive(Debug)]
pub(crate) enum MlpWeights {
    Gated(GatedMlp),
    Plain(PlainMlp),
    Experts(Box<Mixture>),
    DenseAndExperts(Box<DenseAndExperts>),
}

/// Experts, and what selects them.
#[derive(Debug)]
pub(crate) struct Mixture {
    pub(crate) router: Linear,
    /// Added to the scores for the selection.
    pub(crate) score_bias: Option<Tensor>,
    /// The projections before and after the selected experts.
    pub(crate) projections: Option<[Linear; 2]>,
    pub(crate) experts: ExpertWeights,
    pub(crate) shared: Option<SharedExpert>,
}

/// The experts that a router selects from.
#[derive(Debug)]
pub(crate) enum ExpertWeights {
    Gated(Vec<GatedMlp>),
    Plain(Vec<PlainMlp>),
}

/// The maps of a dense MLP.
#[derive(Debug)]
pub(crate) enum DenseMlp {
    Gated(GatedMlp),
    Plain(PlainMlp),
}

/// A dense MLP and experts that read the same residual stream, each through a norm of its own.
#[derive(Debug)]
pub(crate) struct DenseAndExperts {
    pub(crate) dense: GatedMlp,
    pub(crate) dense_output_norm: Norm,
    /// Of the router's input, with the factor of its logits.
    pub(crate) router_norm: Norm,
    pub(crate) router: Linear,
    pub(crate) expert_norm: Norm,
    pub(crate) experts: Vec<GatedMlp>,
    /// A factor for each expert.
    pub(crate) expert_scales: Tensor,
    pub(crate) expert_output_norm: Norm,
}

/// The expert that every token uses.
#[derive(Debug)]
pub(crate) struct SharedExpert {
    pub(crate) mlp: DenseMlp,
    /// Gate of its output.
    pub(crate) gate: Option<Linear>,
}

/// RMSNorm without a bias, LayerNorm with one.
#[derive(Debug)]
pub(crate) struct Norm {
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
}

impl Weights {
    /// Returns the minimum cost of one token. It reads only one row of the embedding table, and only the experts that
    /// the router selects.
    pub(crate) fn token_cost(&self, config: &DecoderConfig) -> TokenCost {
        let selected = config.experts.map_or(0, |experts| experts.routing.num_selected);
        let mut cost = TokenCost::default();
        cost.add(&self.output);
        self.layer_inputs.iter().for_each(|inputs| cost.add(&inputs.projection));
        for layer in &self.layers {
            match &layer.mixer {
                None => {}
                Some(MixerWeights::Attention(attention)) => {
                    let AttentionWeights { query, key, value, output, gate, .. } = &**attention;
                    let maps = [query, output].into_iter().chain(key).chain(value).chain(gate);
                    maps.for_each(|linear| cost.add(linear));
                }
                Some(MixerWeights::LatentAttention(attention)) => {
                    let LatentAttentionWeights { query_rank, plain_query, rotary_query, .. } = &**attention;
                    let LatentAttentionWeights { latent, rotary_key, key_maps, value_maps, output, .. } = &**attention;
                    let maps = [plain_query, rotary_query, latent, rotary_key, output];
                    let maps = maps.into_iter().chain(query_rank.iter().map(|(down, _)| down));
                    maps.chain(key_maps).chain(value_maps).for_each(|linear| cost.add(linear));
                }
                Some(MixerWeights::ShortConvolution(convolution)) => {
                    [&convolution.input, &convolution.output].into_iter().for_each(|linear| cost.add(linear));
                }
                Some(MixerWeights::DeltaNet(delta_net)) => {
                    let DeltaNetWeights { input, gate, beta, time_step, output, .. } = &**delta_net;
                    [input, gate, beta, time_step, output].into_iter().for_each(|linear| cost.add(linear));
                }
                Some(MixerWeights::Mamba2(mamba2)) => {
                    let Mamba2Weights { input, gate, time_step, output, .. } = &**mamba2;
                    [input, gate, time_step, output].into_iter().for_each(|linear| cost.add(linear));
                }
            }
            match &layer.mlp {
                None => {}
                Some(MlpWeights::Plain(mlp)) => cost.add_plain(mlp),
                Some(MlpWeights::Gated(mlp)) => cost.add_mlp(mlp),
                Some(MlpWeights::Experts(mixture)) => {
                    let Mixture { router, projections, experts, shared, .. } = &**mixture;
                    [router].into_iter().chain(projections.iter().flatten()).for_each(|linear| cost.add(linear));
                    match shared.as_ref().map(|shared| &shared.mlp) {
                        Some(DenseMlp::Gated(mlp)) => cost.add_mlp(mlp),
                        Some(DenseMlp::Plain(mlp)) => cost.add_plain(mlp),
                        None => {}
                    }
                    shared.iter().flat_map(|shared| &shared.gate).for_each(|gate| cost.add(gate));
                    match experts {
                        ExpertWeights::Gated(all) => all.iter().take(selected).for_each(|expert| cost.add_mlp(expert)),
                        ExpertWeights::Plain(all) => {
                            all.iter().take(selected).for_each(|expert| cost.add_plain(expert))
                        }
                    }
                }
                Some(MlpWeights::DenseAndExperts(both)) => {
                    cost.add_mlp(&both.dense);
                    cost.add(&both.router);
                    both.experts.iter().take(selected).for_each(|expert| cost.add_mlp(expert));
                }
            }
            if let Some(LayerInputWeights { gate, projection, .. }) = &layer.input {
                [gate, projection].into_iter().for_each(|linear| cost.add(linear));
            }
        }
        cost
    }
}

impl TokenCost {
    fn add(&mut self, linear: &Linear) {
        let weight = &linear.weight;
        self.weight_bytes += weight.dtype().bytes_for(weight.len()).expect("rows are whole blocks") as u64;
        self.products += weight.len() as u64;
    }

    fn add_mlp(&mut self, mlp: &GatedMlp) {
        [&mlp.gate, &mlp.up, &mlp.down].into_iter().for_each(|linear| self.add(linear));
    }

    fn add_plain(&mut self, mlp: &PlainMlp) {
        [&mlp.up, &mlp.down].into_iter().for_each(|linear| self.add(linear));
    }
}
