//! The probe of a request: one token of its reply, looked at from inside the model.

use pellucid_model::{AttentionQuery, DecoderConfig, ProbeQuery};
use pellucid_sampling::{Logprobs, MAX_LOGPROBS};

use crate::{Error, Request};

/// Maximum rows of attention weights.
pub const MAX_PROBE_ROWS: usize = 64;
/// Maximum tokens before the probed one, if attention is reported. The work grows with their square.
pub const MAX_PROBE_POSITIONS: usize = 8192;

/// A token to compute again, and what to report of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProbeRequest {
    /// Index of the token in the reply, from 0.
    pub token: usize,
    /// Number of most probable tokens to report after each layer; `None` reports no layers.
    pub layers: Option<u32>,
    /// The attention weights to report.
    pub attention: Option<AttentionProbe>,
}

/// Attention weights to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionProbe {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Index of the head, from 0; `None` reports the mean of all heads.
    pub head: Option<usize>,
    /// Number of positions to report, the last of which is the one that the token was sampled at; fewer if the sequence
    /// is shorter.
    pub rows: usize,
}

/// Result of a probe.
#[derive(Debug, Clone, PartialEq)]
pub struct Probe {
    /// Index of the probed token in the reply.
    pub token: usize,
    /// Position of the last token before it, whose row was computed again.
    pub position: usize,
    /// The probed token.
    pub id: u32,
    /// Layers of the model.
    pub num_layers: usize,
    /// Attention heads of each layer.
    pub num_heads: usize,
    /// After each layer, the log probability of `id` and those of the most probable tokens.
    pub layers: Vec<Logprobs>,
    /// The attention weights.
    pub attention: Option<AttentionMap>,
}

/// Attention weights of the last positions of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionMap {
    /// The weights that were asked for.
    pub of: AttentionProbe,
    /// The tokens of the sequence up to the probed position.
    pub ids: Vec<u32>,
    /// For each of the last positions, the weights of all positions; 0 where it does not attend.
    pub weights: Vec<Vec<f32>>,
}

impl ProbeRequest {
    /// Returns the number of rows that it computes again, fewer if the sequence is shorter.
    pub(crate) fn num_rows(&self) -> usize {
        self.attention.map_or(1, |attention| attention.rows)
    }

    pub(crate) fn query(&self) -> ProbeQuery {
        let attention = self.attention.map(|AttentionProbe { layer, head, .. }| AttentionQuery { layer, head });
        ProbeQuery { layers: self.layers.is_some(), attention }
    }

    /// Refuses a probe of what the model does not have or the reply cannot reach.
    pub(crate) fn check(&self, request: &Request, config: &DecoderConfig) -> Result<(), Error> {
        let range = |name, value: usize, min: usize, max: usize| {
            let refused = || Error::OutOfRange { name, expected: format!("{min} to {max}"), found: value.to_string() };
            if (min..=max).contains(&value) { Ok(()) } else { Err(refused()) }
        };
        if config.has_state() {
            let expected = "a model without recurrent layers".into();
            return Err(Error::OutOfRange { name: "probe", expected, found: config.architecture.clone() });
        }
        // The work is that of one sequence, and its tokens are known when the probe runs.
        range("n with probe", request.num_choices, 1, 1)?;
        range("best_of with probe", request.best_of, 1, 1)?;
        range("probe.layers", self.layers.unwrap_or(1) as usize, 1, MAX_LOGPROBS as usize)?;
        if let Some(max_tokens) = request.max_tokens {
            range("probe.token", self.token, 0, max_tokens - 1)?;
        }
        let Some(AttentionProbe { layer, head, rows }) = self.attention else { return Ok(()) };
        if config.latent_attention.is_some() {
            let expected = "a model without multi-head latent attention".into();
            return Err(Error::OutOfRange { name: "probe.attention", expected, found: config.architecture.clone() });
        }
        range("probe.attention.layer", layer, 0, config.num_layers() - 1)?;
        range("probe.attention.head", head.unwrap_or(0), 0, config.num_heads - 1)?;
        range("probe.attention.rows", rows, 1, MAX_PROBE_ROWS)?;
        let num_before = request.prompt.len().saturating_add(self.token);
        range("tokens before probe.token", num_before, 1, MAX_PROBE_POSITIONS)
    }
}
