//! The weights of a decoder, named as the arithmetic names them.

use pellucid_tensor::{GatedMlp, Linear, Tensor};

/// Immutable once loaded.
#[derive(Debug)]
pub(crate) struct Weights {
    /// `[vocabulary][hidden]`
    pub(crate) embedding: Tensor,
    /// `[context][hidden]`, for learned and sinusoidal positions.
    pub(crate) positions: Option<Tensor>,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: Norm,
    /// `[vocabulary][hidden]`; absent when it is the embedding table.
    pub(crate) output: Linear,
}

#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) attention_norm: Norm,
    pub(crate) attention: AttentionWeights,
    pub(crate) attention_output_norm: Option<Norm>,
    pub(crate) mlp_norm: Norm,
    pub(crate) mlp: MlpWeights,
    pub(crate) mlp_output_norm: Option<Norm>,
}

#[derive(Debug)]
pub(crate) struct AttentionWeights {
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    pub(crate) output: Linear,
    /// One weight for each number of a head, the same for all heads.
    pub(crate) query_norm: Option<Norm>,
    pub(crate) key_norm: Option<Norm>,
}

#[derive(Debug)]
pub(crate) enum MlpWeights {
    Gated(GatedMlp),
    Plain { up: Linear, down: Linear },
    Experts { router: Linear, experts: Vec<GatedMlp> },
}

/// RMSNorm without a bias, LayerNorm with one.
#[derive(Debug)]
pub(crate) struct Norm {
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
}
