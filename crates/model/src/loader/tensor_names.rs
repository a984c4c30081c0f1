//! The names of a decoder's tensors in files. `{}` stands for the layer's number, `{expert}` for the expert's.

/// The names of the tensors in one kind of file, without the ending `.weight` or `.bias`. An empty name: these files
/// have no such tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorNames {
    /// Prefixes of all names. The first one under which the token embedding is found is used for all tensors.
    pub(crate) prefixes: &'static [&'static str],
    pub(crate) token_embedding: &'static str,
    pub(crate) position_embedding: &'static str,
    pub(crate) final_norm: &'static str,
    /// Output projection; none of the prefixes is added.
    pub(crate) output: &'static str,
    pub(crate) attention_norm: &'static str,
    pub(crate) query: &'static str,
    pub(crate) key: &'static str,
    pub(crate) value: &'static str,
    /// Query, key and value stacked.
    pub(crate) fused_qkv: &'static str,
    pub(crate) attention_output: &'static str,
    /// The scores of attention sinks; the ending may be missing.
    pub(crate) sinks: &'static str,
    pub(crate) query_norm: &'static str,
    pub(crate) key_norm: &'static str,
    pub(crate) attention_output_norm: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    /// Gate and up stacked.
    pub(crate) fused_gate_up: &'static str,
    pub(crate) down: &'static str,
    pub(crate) mlp_output_norm: &'static str,
    pub(crate) router: &'static str,
    /// The bias of the router's scores, with its ending.
    pub(crate) score_bias: &'static str,
    pub(crate) expert_gate: &'static str,
    pub(crate) expert_up: &'static str,
    pub(crate) expert_down: &'static str,
    /// Gate and up of all experts.
    pub(crate) fused_expert_gate_up: &'static str,
    pub(crate) shared_gate: &'static str,
    pub(crate) shared_up: &'static str,
    /// Gate and up of the shared expert, stacked.
    pub(crate) fused_shared_gate_up: &'static str,
    pub(crate) shared_down: &'static str,
    /// Substrings of the names of tensors that files contain and the arithmetic does not need: cached masks and
    /// frequencies.
    pub(crate) ignored: &'static [&'static str],
}

/// GGUF files of every architecture.
pub(crate) const GGUF: TensorNames = TensorNames {
    prefixes: &[""],
    token_embedding: "token_embd",
    position_embedding: "position_embd",
    final_norm: "output_norm",
    output: "output",
    attention_norm: "blk.{}.attn_norm",
    query: "blk.{}.attn_q",
    key: "blk.{}.attn_k",
    value: "blk.{}.attn_v",
    fused_qkv: "blk.{}.attn_qkv",
    attention_output: "blk.{}.attn_output",
    sinks: "blk.{}.attn_sinks",
    query_norm: "blk.{}.attn_q_norm",
    key_norm: "blk.{}.attn_k_norm",
    attention_output_norm: "blk.{}.post_attention_norm",
    mlp_norm: "blk.{}.ffn_norm",
    gate: "blk.{}.ffn_gate",
    up: "blk.{}.ffn_up",
    fused_gate_up: "",
    down: "blk.{}.ffn_down",
    mlp_output_norm: "blk.{}.post_ffw_norm",
    router: "blk.{}.ffn_gate_inp",
    score_bias: "blk.{}.exp_probs_b.bias",
    expert_gate: "blk.{}.ffn_gate_exps",
    expert_up: "blk.{}.ffn_up_exps",
    expert_down: "blk.{}.ffn_down_exps",
    fused_expert_gate_up: "blk.{}.ffn_gate_up_exps",
    shared_gate: "blk.{}.ffn_gate_shexp",
    shared_up: "blk.{}.ffn_up_shexp",
    fused_shared_gate_up: "",
    shared_down: "blk.{}.ffn_down_shexp",
    // Read with the configuration, not with the weights.
    ignored: &["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"],
};

/// Hugging Face folders of Llama and of the families that keep its names.
pub(crate) const HUGGING_FACE: TensorNames = TensorNames {
    // Folders of embedding models hold the decoder alone, without the prefix.
    prefixes: &["model.", ""],
    token_embedding: "embed_tokens",
    position_embedding: "",
    final_norm: "norm",
    output: "lm_head",
    attention_norm: "layers.{}.input_layernorm",
    query: "layers.{}.self_attn.q_proj",
    key: "layers.{}.self_attn.k_proj",
    value: "layers.{}.self_attn.v_proj",
    fused_qkv: "",
    attention_output: "layers.{}.self_attn.o_proj",
    sinks: "layers.{}.self_attn.sinks",
    query_norm: "layers.{}.self_attn.q_norm",
    key_norm: "layers.{}.self_attn.k_norm",
    attention_output_norm: "",
    mlp_norm: "layers.{}.post_attention_layernorm",
    gate: "layers.{}.mlp.gate_proj",
    up: "layers.{}.mlp.up_proj",
    fused_gate_up: "",
    down: "layers.{}.mlp.down_proj",
    mlp_output_norm: "",
    router: "layers.{}.mlp.gate",
    score_bias: "layers.{}.mlp.gate.e_score_correction_bias",
    expert_gate: "layers.{}.mlp.experts.{expert}.gate_proj",
    expert_up: "layers.{}.mlp.experts.{expert}.up_proj",
    expert_down: "layers.{}.mlp.experts.{expert}.down_proj",
    fused_expert_gate_up: "",
    shared_gate: "layers.{}.mlp.shared_experts.gate_proj",
    shared_up: "layers.{}.mlp.shared_experts.up_proj",
    fused_shared_gate_up: "",
    shared_down: "layers.{}.mlp.shared_experts.down_proj",
    ignored: &["rotary_emb.inv_freq"],
};
