//! Operations that not every backend has.

/// An operation that not every backend has. A model that needs one is refused when it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extension {
    /// [`Attend::sinks`](crate::Attend::sinks).
    AttentionSinks,
    /// [`Activation::ClampedSwiglu`](crate::Activation::ClampedSwiglu).
    ClampedSwiglu,
    /// Experts whose linear maps have biases.
    ExpertBiases,
    /// [`Scoring::Sigmoid`](crate::Scoring::Sigmoid), with everything else that
    /// [`Routing::softmax`](crate::Routing::softmax) leaves out.
    SigmoidRouter,
    /// [`Backend::short_convolution`](crate::Backend::short_convolution).
    ShortConvolution,
    /// [`ExpertMlp::expert_scales`](crate::ExpertMlp::expert_scales).
    ExpertScales,
    /// [`Backend::gate_by_columns`](crate::Backend::gate_by_columns).
    LayerInputs,
    /// [`Backend::scale`](crate::Backend::scale).
    LayerScales,
    /// [`Backend::delta_net`](crate::Backend::delta_net).
    DeltaNet,
    /// [`Backend::sigmoid_gate`](crate::Backend::sigmoid_gate).
    SigmoidGates,
    /// [`Values::InKeys`](crate::Values::InKeys), [`Backend::map_heads`](crate::Backend::map_heads) and
    /// [`Backend::join_heads`](crate::Backend::join_heads).
    LatentAttention,
    /// [`Backend::mamba2`](crate::Backend::mamba2).
    Mamba2,
    /// [`Backend::plain_expert_mlp`](crate::Backend::plain_expert_mlp).
    PlainExperts,
    /// [`Activation::SquaredRelu`](crate::Activation::SquaredRelu).
    SquaredRelu,
    /// Blocks of keys and values that only layers with sliding windows use, with block tables of their own.
    WindowBlocks,
    /// [`Backend::expert_gates`](crate::Backend::expert_gates) and
    /// [`Backend::expert_sums`](crate::Backend::expert_sums), and with [`Extension::PlainExperts`]
    /// [`Backend::plain_expert_activations`](crate::Backend::plain_expert_activations) and
    /// [`Backend::plain_expert_sums`](crate::Backend::plain_expert_sums).
    SharedExperts,
    /// [`Mamba2::norm`](crate::Mamba2::norm) may be `None`, and
    /// [`Backend::grouped_rms_norm`](crate::Backend::grouped_rms_norm).
    SharedMamba2,
}

impl Extension {
    /// Returns its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Extension::AttentionSinks => "attention sinks",
            Extension::ClampedSwiglu => "clamped SwiGLU",
            Extension::ExpertBiases => "experts with biases",
            Extension::SigmoidRouter => "a router with sigmoid scores",
            Extension::ShortConvolution => "short convolutions",
            Extension::ExpertScales => "experts with factors",
            Extension::LayerInputs => "layers with inputs of their own",
            Extension::LayerScales => "layers with factors",
            Extension::DeltaNet => "gated delta nets",
            Extension::SigmoidGates => "outputs with sigmoid gates",
            Extension::LatentAttention => "multi-head latent attention",
            Extension::Mamba2 => "Mamba-2 layers",
            Extension::PlainExperts => "experts without gates",
            Extension::SquaredRelu => "squared ReLU",
            Extension::WindowBlocks => "KV blocks of layers with windows",
            Extension::SharedExperts => "experts that ranks share out",
            Extension::SharedMamba2 => "Mamba-2 layers that ranks share out",
        }
    }
}
