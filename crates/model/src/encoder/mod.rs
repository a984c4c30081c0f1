//! The encoder: embed, layers of attention in both directions and MLP, and pooling to one vector for each text. Read
//! [`Encoder::compute`] first.
//!
//! BERT and its successors share this code, as the decoders share theirs. There is no cache and no step: all rows of a
//! text are computed at once. Texts are joined into batches without padding, and the backend computes each row
//! independently of the others, so a vector does not depend on the other texts of its batch.

mod activations;
mod config;
mod families;
mod head;
mod tensor_names;
mod weights;

use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{
    Backend, BidirectionalAttention, Error as DeviceError, HeadShape, Input, Rope, RopeStyle, StoreKv, TableRows,
    Tensor, TokenSource,
};

use crate::embedding::{Embedder, EmbedderInfo, EmbeddingText};
use crate::rope::RopeFrequencies;
use crate::{BLOCK_LEN, Error, LoadOptions, Pooling};
use activations::EncoderActivations;
pub use config::{ClassifierConfig, EncoderConfig, EncoderLayer, EncoderPositions, NormPlacement};
use families::EncoderBlueprint;
pub(crate) use families::{folder_pooling, gguf_pooling};
pub use families::{is_encoder, supported_encoders};
pub use head::HeadActivation;
use weights::{EncoderLayerWeights, EncoderMlp, EncoderWeights, LayerNorm};

/// Rows of a batch that keep a CPU busy. One text may have more.
const BATCH_ROWS: usize = 1024;

/// The encoder of every supported family.
#[derive(Debug)]
pub struct Encoder {
    config: EncoderConfig,
    info: EmbedderInfo,
    backend: Arc<dyn Backend>,
    weights: EncoderWeights,
    ropes: Vec<RopeFrequencies>,
    batch: EncoderBatch,
    activations: EncoderActivations,
    /// The rows of a batch after the last layer.
    rows: Vec<f32>,
}

/// The texts of a batch, flattened.
#[derive(Debug, Default)]
struct EncoderBatch {
    ids: Vec<TokenSource>,
    types: Vec<u32>,
    positions: Vec<u32>,
    sequences: Vec<pellucid_tensor::SequenceSpan>,
    block_tables: Vec<u32>,
    slots: Vec<u32>,
    /// For each row, the first and the last position that it sees: of the layers without a maximum distance, and of
    /// those with one.
    full: [Vec<u32>; 2],
    local: [Vec<u32>; 2],
}

impl EncoderBatch {
    fn clear(&mut self) {
        let EncoderBatch { ids, types, positions, sequences, block_tables, slots, full, local } = self;
        ids.clear();
        sequences.clear();
        for list in [types, positions, block_tables, slots].into_iter().chain(full).chain(local) {
            list.clear();
        }
    }

    fn push(&mut self, text: EmbeddingText<'_>, max_distance: Option<usize>) {
        let first_row = self.ids.len();
        let first_block = self.block_tables.len();
        let len = text.ids.len();
        let last = len as u32 - 1;
        let distance = max_distance.unwrap_or(len) as u32;
        for (position, &id) in text.ids.iter().enumerate() {
            self.ids.push(TokenSource::Token(id));
            self.types.push(u32::from(position >= text.second_at));
            let position = position as u32;
            self.positions.push(position);
            self.slots.push((first_block * BLOCK_LEN) as u32 + position);
            self.full[0].push(0);
            self.full[1].push(last);
            self.local[0].push(position.saturating_sub(distance));
            self.local[1].push(position.saturating_add(distance).min(last));
        }
        self.block_tables.extend((0..len.div_ceil(BLOCK_LEN)).map(|block| (first_block + block) as u32));
        self.sequences.push(pellucid_tensor::SequenceSpan {
            rows: first_row..self.ids.len(),
            blocks: first_block..self.block_tables.len(),
        });
    }
}

/// Reads the configuration of an encoder's checkpoint, without loading its weights.
pub fn read_encoder_config(checkpoint: &Checkpoint) -> Result<EncoderConfig, Error> {
    Ok(families::blueprint(checkpoint)?.config)
}

impl Encoder {
    /// Loads a checkpoint. `pooling` replaces the one that the checkpoint states. Calls `progress` with the number of
    /// loaded parts and of all parts.
    pub fn load(
        checkpoint: &Checkpoint,
        backend: Arc<dyn Backend>,
        pooling: Option<Pooling>,
        options: LoadOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Encoder, Error> {
        let mut blueprint = families::blueprint(checkpoint)?;
        if let Some(requested) = options.context_len {
            let limit = blueprint.config.context_len;
            if requested > limit {
                return Err(Error::ContextTooLong { requested, limit });
            }
            blueprint.config.context_len = requested;
        }
        let classifier = blueprint.config.classifier;
        let pooling = match classifier {
            Some(classifier) => classifier.pooling,
            None => pooling.or(blueprint.config.pooling).ok_or(Error::NoPooling)?,
        };
        let weights = weights::load(checkpoint, &*backend, &blueprint, progress)?;
        let EncoderBlueprint { config, .. } = blueprint;
        let ropes: Vec<_> = match &config.positions {
            EncoderPositions::Rope(tables) => tables.iter().map(|rope| rope.frequencies(config.context_len)).collect(),
            EncoderPositions::Learned => Vec::new(),
        };
        let activations = EncoderActivations::new(&config, &*backend, &ropes)?;
        let info = EmbedderInfo {
            architecture: config.architecture.clone(),
            num_dimensions: if classifier.is_some() { 1 } else { config.hidden_size },
            scores_pairs: classifier.is_some(),
            context_len: config.context_len,
            vocab_size: config.vocab_size,
            pooling,
        };
        let batch = EncoderBatch::default();
        Ok(Encoder { config, info, backend, weights, ropes, batch, activations, rows: Vec::new() })
    }

    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// `hidden = norm(token + type + position)`
    fn embed(&mut self) -> Result<(), DeviceError> {
        let Encoder { config, backend, weights, batch, activations: a, .. } = self;
        backend.embed(&weights.tokens, TableRows::Tokens(&batch.ids), 1.0, &mut a.hidden)?;
        let added = [(&weights.types, &batch.types), (&weights.positions, &batch.positions)];
        for (table, rows) in added.into_iter().filter_map(|(table, rows)| Some((table.as_ref()?, rows))) {
            backend.embed(table, TableRows::Positions(rows), 1.0, &mut a.update)?;
            backend.add(&a.update, &mut a.hidden)?;
        }
        for (rope, angles) in self.ropes.iter().zip(&mut a.angles) {
            backend.rope_angles(&batch.positions, &rope.frequencies, rope.factor, angles)?;
        }
        normalize(&**backend, &weights.embedding_norm, config.norm_eps, &mut a.hidden, &mut a.normed)
    }

    /// Computes all rows of the batch.
    fn compute(&mut self) -> Result<(), DeviceError> {
        self.embed()?;
        let Encoder { config, backend, weights, batch, activations, .. } = self;
        let backend = &**backend;
        for (index, layer) in weights.layers.iter().enumerate() {
            attention(backend, config, index, layer, batch, activations)?;
            mlp(backend, config, layer, activations)?;
        }
        match &weights.final_norm {
            Some(norm) => normalize(backend, norm, config.norm_eps, &mut activations.hidden, &mut activations.normed),
            None => Ok(()),
        }
    }

    /// Computes the vectors of the texts of the batch and appends them to `out`.
    fn finish_batch(&mut self, out: &mut Vec<f32>) -> Result<(), Error> {
        let backend = self.backend.clone();
        self.activations.resize(&*backend, self.batch.ids.len(), self.batch.block_tables.len())?;
        self.compute()?;
        let hidden = &self.activations.hidden;
        self.rows.resize(hidden.len(), 0.0);
        backend.read(hidden, &mut self.rows)?;
        let len = self.config.hidden_size;
        for sequence in &self.batch.sequences {
            let rows = &self.rows[sequence.rows.start * len..sequence.rows.end * len];
            match &self.weights.head {
                None => self.info.pooling.apply(rows, len, out),
                Some(head) => {
                    let mut pooled = Vec::with_capacity(len);
                    head.pooling().apply(rows, len, &mut pooled);
                    out.push(head.score(&pooled));
                }
            }
        }
        self.batch.clear();
        Ok(())
    }
}

/// `x = norm(x)`. `spare` holds the old values afterwards.
fn normalize(
    backend: &dyn Backend,
    norm: &LayerNorm,
    eps: f32,
    x: &mut Tensor,
    spare: &mut Tensor,
) -> Result<(), DeviceError> {
    backend.layer_norm(x, &norm.weight, &norm.bias, eps, spare)?;
    std::mem::swap(x, spare);
    Ok(())
}

/// `hidden = norm(hidden + attention(hidden))`, or `hidden += attention(norm(hidden))`.
fn attention(
    backend: &dyn Backend,
    config: &EncoderConfig,
    index: usize,
    weights: &EncoderLayerWeights,
    batch: &EncoderBatch,
    a: &mut EncoderActivations,
) -> Result<(), DeviceError> {
    let layer = config.layers[index];
    let (head_size, num_heads) = (config.head_size(), config.num_heads);
    let input = match (&weights.attention_norm, config.norm_placement) {
        (Some(norm), NormPlacement::Before) => {
            backend.layer_norm(&a.hidden, &norm.weight, &norm.bias, config.norm_eps, &mut a.normed)?;
            &a.normed
        }
        _ => &a.hidden,
    };
    let mut maps = [(&weights.query, &mut a.queries), (&weights.key, &mut a.keys), (&weights.value, &mut a.values)];
    backend.linears(Input::Rows(input), &mut maps)?;
    if let Some(angles) = a.angles.get(layer.rope) {
        let rope = Rope { angles, head_size, style: RopeStyle::Half };
        backend.rope(rope, &mut a.queries)?;
        backend.rope(rope, &mut a.keys)?;
    }
    let shape = HeadShape { num_heads, num_kv_heads: num_heads, head_size, block_len: BLOCK_LEN };
    let store = StoreKv { keys: &a.keys, values: &a.values, slots: &batch.slots, shape };
    backend.store_kv(store, &mut a.kv)?;
    let [first_visible, last_visible] = if layer.max_distance.is_some() { &batch.local } else { &batch.full };
    let call = BidirectionalAttention {
        queries: &a.queries,
        kv: &a.kv,
        first_visible,
        last_visible,
        sequences: &batch.sequences,
        block_tables: &batch.block_tables,
        shape,
        scale: 1.0 / (head_size as f32).sqrt(),
    };
    backend.bidirectional_attention(call, &mut a.attended)?;
    backend.linear(&a.attended, &weights.output, &mut a.update)?;
    backend.add(&a.update, &mut a.hidden)?;
    match (&weights.attention_norm, config.norm_placement) {
        (Some(norm), NormPlacement::After) => normalize(backend, norm, config.norm_eps, &mut a.hidden, &mut a.normed),
        _ => Ok(()),
    }
}

/// `hidden = norm(hidden + mlp(hidden))`, or `hidden += mlp(norm(hidden))`.
fn mlp(
    backend: &dyn Backend,
    config: &EncoderConfig,
    weights: &EncoderLayerWeights,
    a: &mut EncoderActivations,
) -> Result<(), DeviceError> {
    let norm = &weights.mlp_norm;
    let input = match config.norm_placement {
        NormPlacement::After => &a.hidden,
        NormPlacement::Before => {
            backend.layer_norm(&a.hidden, &norm.weight, &norm.bias, config.norm_eps, &mut a.normed)?;
            &a.normed
        }
    };
    let down = match &weights.mlp {
        EncoderMlp::Gated(mlp) => {
            let maps = [(&mlp.gate, &mut a.gate), (&mlp.up, &mut a.up)];
            backend.gated(Input::Rows(input), maps, config.activation)?;
            &mlp.down
        }
        EncoderMlp::Plain { up, down } => {
            backend.linear(input, up, &mut a.gate)?;
            backend.activate(config.activation, &mut a.gate)?;
            down
        }
    };
    backend.linear(&a.gate, down, &mut a.update)?;
    backend.add(&a.update, &mut a.hidden)?;
    match config.norm_placement {
        NormPlacement::After => normalize(backend, norm, config.norm_eps, &mut a.hidden, &mut a.normed),
        NormPlacement::Before => Ok(()),
    }
}

impl Embedder for Encoder {
    fn info(&self) -> &EmbedderInfo {
        &self.info
    }

    fn embed(&mut self, texts: &[EmbeddingText<'_>], out: &mut Vec<f32>) -> Result<(), Error> {
        self.batch.clear();
        let max_distance = self.config.layers.iter().find_map(|layer| layer.max_distance);
        for text in texts {
            self.info.check(text)?;
            if !self.batch.ids.is_empty() && self.batch.ids.len() + text.ids.len() > BATCH_ROWS {
                self.finish_batch(out)?;
            }
            self.batch.push(*text, max_distance);
        }
        if self.batch.ids.is_empty() { Ok(()) } else { self.finish_batch(out) }
    }
}
