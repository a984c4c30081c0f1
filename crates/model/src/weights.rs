//! The weights of a decoder, under the names that the arithmetic uses.

use pellucid_tensor::{GatedMlp, Linear, Tensor};

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
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: Norm,
    /// `[vocabulary][hidden]`; packed from the embedding table if the model has no output projection.
    pub(crate) output: Linear,
}

#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) attention_norm: Option<Norm>,
    pub(crate) attention: AttentionWeights,
    pub(crate) attention_output_norm: Option<Norm>,
    pub(crate) mlp_norm: Option<Norm>,
    pub(crate) mlp: MlpWeights,
    pub(crate) mlp_output_norm: Option<Norm>,
}

#[derive(Debug)]
pub(crate) struct AttentionWeights {
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    pub(crate) output: Linear,
    /// One weight for each value of a head, or for each value of a row.
    pub(crate) query_norm: Option<Norm>,
    pub(crate) key_norm: Option<Norm>,
    /// A score for each head.
    pub(crate) sinks: Option<Tensor>,
}

#[derive(Debug)]
pub(crate) enum MlpWeights {
    Gated(GatedMlp),
    Plain {
        up: Linear,
        down: Linear,
    },
    Experts {
        router: Linear,
        /// Added to the scores for the selection.
        score_bias: Option<Tensor>,
        experts: Vec<GatedMlp>,
        shared: Option<GatedMlp>,
    },
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
        for layer in &self.layers {
            let attention = &layer.attention;
            for linear in [&attention.query, &attention.key, &attention.value, &attention.output] {
                cost.add(linear);
            }
            match &layer.mlp {
                MlpWeights::Plain { up, down } => [up, down].into_iter().for_each(|linear| cost.add(linear)),
                MlpWeights::Gated(mlp) => cost.add_mlp(mlp),
                MlpWeights::Experts { router, experts, shared, .. } => {
                    cost.add(router);
                    shared.iter().for_each(|shared| cost.add_mlp(shared));
                    experts.iter().take(selected).for_each(|expert| cost.add_mlp(expert));
                }
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
}
