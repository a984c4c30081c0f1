//! The result of a probe in the reply's `pellucid` object.

use pellucid_engine::{AttentionMap, Probe};
use pellucid_generate::ReplyProbe;
use pellucid_sampling::Logprobs;
use serde::Serialize;
use utoipa::ToSchema;

use crate::openai::logprobs::text_of;

/// Result of a probe.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct ProbeReport {
    /// Index of the probed token in the reply.
    token: usize,
    /// Position of the last token before it, which was computed again.
    position: usize,
    /// Id of the probed token.
    id: u32,
    text: String,
    /// Layers of the model.
    num_layers: usize,
    /// Attention heads of each layer.
    num_heads: usize,
    /// After each layer, the most probable tokens if the final norm and the output projection followed at once.
    layers: Vec<LayerReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<AttentionReport>,
}

/// The guess after a layer.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct LayerReport {
    /// Index of the layer, from 0.
    layer: usize,
    /// Log probability of the probed token; null if it has none.
    #[schema(required)]
    logprob: Option<f32>,
    top: Vec<GuessReport>,
}

/// A token with its log probability.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct GuessReport {
    id: u32,
    text: String,
    #[schema(required)]
    logprob: Option<f32>,
}

/// Attention weights.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct AttentionReport {
    layer: usize,
    /// Null for the mean of all heads.
    #[schema(required)]
    head: Option<usize>,
    /// Position of the first row of `weights`.
    first_position: usize,
    /// The tokens up to the probed position.
    tokens: Vec<TokenReport>,
    /// A row for each position from `first_position` on: its weights over itself and the positions before it. They sum
    /// to 1, or to less if the model has attention sinks.
    weights: Vec<Vec<f32>>,
}

/// A token of the sequence.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct TokenReport {
    id: u32,
    text: String,
}

impl ProbeReport {
    pub(crate) fn new(shown: &ReplyProbe) -> ProbeReport {
        let text = |id: u32| text_of(&shown.tokenizer.shown_bytes(id, false));
        let Probe { token, position, id, num_layers, num_heads, ref layers, ref attention } = shown.probe;
        let layer = |(layer, found): (usize, &Logprobs)| LayerReport {
            layer,
            logprob: finite(found.chosen),
            top: (found.top.iter())
                .map(|&(id, logprob)| GuessReport { id, text: text(id), logprob: finite(logprob) })
                .collect(),
        };
        let map = |map: &AttentionMap| {
            let first_position = map.ids.len() - map.weights.len();
            AttentionReport {
                layer: map.of.layer,
                head: map.of.head,
                first_position,
                tokens: map.ids.iter().map(|&id| TokenReport { id, text: text(id) }).collect(),
                weights: (map.weights.iter().enumerate())
                    .map(|(row, weights)| weights[..=first_position + row].to_vec())
                    .collect(),
            }
        };
        ProbeReport {
            token,
            position,
            id,
            text: text(id),
            num_layers,
            num_heads,
            layers: layers.iter().enumerate().map(layer).collect(),
            attention: attention.as_ref().map(map),
        }
    }
}

/// JSON has no infinity.
fn finite(value: f32) -> Option<f32> {
    value.is_finite().then_some(value)
}
