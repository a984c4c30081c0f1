//! The names of an encoder's tensors in files. `{}` stands for the layer's number.

/// The names of the tensors in one kind of file, without the ending `.weight` or `.bias`. An empty name: these files
/// have no such tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EncoderNames {
    /// Prefixes of all names. The first one under which the token embedding is found is used for all tensors.
    pub(crate) prefixes: &'static [&'static str],
    pub(crate) token_embedding: &'static str,
    pub(crate) position_embedding: &'static str,
    pub(crate) type_embedding: &'static str,
    pub(crate) embedding_norm: &'static str,
    pub(crate) query: &'static str,
    pub(crate) key: &'static str,
    pub(crate) value: &'static str,
    /// Query, key and value stacked.
    pub(crate) fused_qkv: &'static str,
    pub(crate) attention_output: &'static str,
    pub(crate) attention_norm: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    /// Gate and up stacked.
    pub(crate) fused_gate_up: &'static str,
    pub(crate) down: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) final_norm: &'static str,
    /// The maps of a cross-encoder's classifier, and the norm between them.
    pub(crate) head_dense: &'static str,
    pub(crate) head_norm: &'static str,
    pub(crate) classifier: &'static str,
    /// Beginnings of the names of tensors that files contain and vectors do not need: heads of other tasks, cached
    /// positions.
    pub(crate) ignored: &'static [&'static str],
}

/// GGUF files of every family whose norms follow the residual sum.
pub(crate) const GGUF: EncoderNames = EncoderNames {
    prefixes: &[""],
    token_embedding: "token_embd",
    position_embedding: "position_embd",
    type_embedding: "token_types",
    embedding_norm: "token_embd_norm",
    query: "blk.{}.attn_q",
    key: "blk.{}.attn_k",
    value: "blk.{}.attn_v",
    fused_qkv: "blk.{}.attn_qkv",
    attention_output: "blk.{}.attn_output",
    attention_norm: "blk.{}.attn_output_norm",
    gate: "blk.{}.ffn_gate",
    up: "blk.{}.ffn_up",
    fused_gate_up: "",
    down: "blk.{}.ffn_down",
    mlp_norm: "blk.{}.layer_output_norm",
    final_norm: "",
    head_dense: "",
    head_norm: "",
    classifier: "",
    ignored: &[],
};
