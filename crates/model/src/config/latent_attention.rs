//! Multi-head latent attention (MLA): keys and values of all heads are linear maps of one small row, the latent.
//!
//! Only the latent and one rotated key for all heads are stored. A query is mapped to the latents instead of every
//! latent to a key (the maps are absorbed), so that attention has a single key head, whose keys are the stored rows and
//! whose values are the latents in them.

use super::{DecoderConfig, Positions};
use crate::rope::{RopeScaling, scaled_yarn_attention_factor};

/// Sizes of latent attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentAttention {
    /// Rank of the map of queries; `None` if it is one matrix.
    pub query_rank: Option<usize>,
    /// Number of values of a latent.
    pub latent_size: usize,
    /// Number of values of a head's query that are rotated. The keys of all heads share these values.
    pub rotary_size: usize,
    /// Number of values of a head's query and key that are not rotated.
    pub plain_size: usize,
    /// Number of values of a head's value.
    pub value_size: usize,
    /// YaRN's `mscale_all_dim`, which scales attention scores; 0 if they are not scaled.
    pub yarn_scale: f32,
}

impl LatentAttention {
    /// Epsilon of the norms of latents and of low-rank queries: the reference implementation's, which no file states.
    pub(crate) const NORM_EPS: f32 = 1e-6;

    /// Returns the number of values that are stored for a position: the rotated ones, then the latent.
    pub fn row_size(self) -> usize {
        self.rotary_size + self.latent_size
    }

    /// Returns the number of values of a head's query and key, as the model was trained.
    pub fn key_size(self) -> usize {
        self.plain_size + self.rotary_size
    }
}

impl DecoderConfig {
    /// Gives the layers latent attention: its stored rows become the keys of a single head. Positions are set before.
    pub(crate) fn set_latent_attention(&mut self, mut latent: LatentAttention) {
        let mut scale = 1.0 / (latent.key_size() as f32).sqrt();
        match &self.positions {
            Positions::Rope { tables, .. } if latent.yarn_scale != 0.0 => match tables[0].scaling {
                RopeScaling::Yarn { factor, .. } => {
                    let of_scores = scaled_yarn_attention_factor(factor, latent.yarn_scale);
                    scale *= of_scores * of_scores;
                }
                _ => latent.yarn_scale = 0.0,
            },
            _ => {}
        }
        self.num_kv_heads = 1;
        self.head_size = latent.row_size();
        self.attention_scale = scale;
        self.latent_attention = Some(latent);
    }
}
