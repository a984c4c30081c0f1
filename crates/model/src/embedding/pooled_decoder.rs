//! Vectors from a decoder: its rows after the last norm are pooled. Qwen3-Embedding and its like are such models.

use pellucid_checkpoint::{Checkpoint, Source};
use pellucid_tensor::{DType, StateSave};

use crate::config::gguf::Keys;
use crate::encoder::{folder_pooling, gguf_pooling};
use crate::{BLOCK_LEN, Batch, Chunk, ChunkIds, ChunkState, Decoder, Error, KvMemory, Model as _};

use super::{Embedder, EmbedderInfo, EmbeddingText, Pooling};

/// Returns the pooling that a checkpoint states: by `pooling_type` of a GGUF file, or by the files of
/// sentence-transformers in a folder. A decoder that states one is meant to compute vectors.
pub fn stated_pooling(checkpoint: &Checkpoint) -> Result<Option<Pooling>, Error> {
    match checkpoint.source() {
        Source::Gguf(metadata) => gguf_pooling(Keys::new(metadata, checkpoint.architecture()?)),
        Source::HuggingFace(files) => folder_pooling(files),
    }
}

/// A decoder whose rows are pooled to one vector for each text.
#[derive(Debug)]
pub struct DecoderEmbedder {
    decoder: Decoder,
    info: EmbedderInfo,
    kv: KvMemory,
    batch: Batch,
    /// Maximum rows of a step.
    chunk_len: usize,
    blocks: Vec<u32>,
    rows: Vec<f32>,
    /// Number of wanted rows of each text of the batch.
    num_wanted: Vec<usize>,
}

impl DecoderEmbedder {
    /// Allocates memory for keys and values of one whole context.
    pub fn new(decoder: Decoder, pooling: Pooling, kv_dtype: DType) -> Result<DecoderEmbedder, Error> {
        let config = decoder.config();
        let chunk_len = decoder.backend().chunk_len();
        // Texts of one token take a block each; a step has at most `chunk_len` of them.
        let num_blocks = config.context_len.div_ceil(BLOCK_LEN).max(chunk_len);
        let kv = KvMemory::new(config, decoder.devices(), kv_dtype, num_blocks, BLOCK_LEN)?;
        let kv = kv.with_states(config, decoder.devices(), 1)?;
        let info = EmbedderInfo {
            architecture: config.architecture.clone(),
            num_dimensions: config.hidden_size,
            scores_pairs: false,
            context_len: config.context_len,
            vocab_size: config.vocab_size,
            pooling,
        };
        Ok(DecoderEmbedder {
            decoder,
            info,
            kv,
            batch: Batch::default(),
            chunk_len,
            blocks: (0..num_blocks as u32).collect(),
            rows: Vec::new(),
            num_wanted: Vec::new(),
        })
    }

    /// Runs the batch, and keeps its wanted rows.
    fn run(&mut self) -> Result<(), Error> {
        let DecoderEmbedder { decoder, kv, batch, rows, .. } = self;
        let result = if batch.num_wanted() > 0 { decoder.hidden_rows(batch, kv, rows) } else { Ok(()) };
        batch.clear();
        result
    }

    /// Appends the vectors of all texts whose rows are there.
    fn pool(&mut self, out: &mut Vec<f32>) {
        let len = self.info.num_dimensions;
        let mut start = 0;
        for num_wanted in self.num_wanted.drain(..) {
            let end = start + num_wanted * len;
            self.info.pooling.apply(&self.rows[start..end], len, out);
            start = end;
        }
        self.rows.clear();
    }

    /// Computes a text that is longer than a step, chunk by chunk.
    fn embed_long(&mut self, ids: &[u32]) -> Result<(), Error> {
        let mut num_wanted = 0;
        for first_position in (0..ids.len()).step_by(self.chunk_len) {
            let end = ids.len().min(first_position + self.chunk_len);
            let chunk = &ids[first_position..end];
            // Rows that pooling does not use are computed for their keys and values. A step needs a wanted row.
            let wanted = match self.info.pooling {
                Pooling::Mean => 0..chunk.len(),
                Pooling::Cls => 0..1,
                Pooling::Last => chunk.len() - 1..chunk.len(),
            };
            num_wanted += wanted.len();
            let save = StateSave { row: chunk.len() as u32 - 1, slot: 0 };
            let (ids, state) = (ChunkIds::Tokens(chunk), ChunkState::in_place(first_position, &save));
            let chunk = Chunk { ids, first_position, blocks: &self.blocks, wanted, queries: &[], state };
            self.batch.push(chunk, BLOCK_LEN);
            self.run()?;
        }
        self.num_wanted.push(num_wanted);
        Ok(())
    }
}

impl Embedder for DecoderEmbedder {
    fn info(&self) -> &EmbedderInfo {
        &self.info
    }

    fn embed(&mut self, texts: &[EmbeddingText<'_>], out: &mut Vec<f32>) -> Result<(), Error> {
        self.batch.clear();
        self.rows.clear();
        self.num_wanted.clear();
        let mut first_block = 0;
        for text in texts {
            self.info.check(text)?;
            let len = text.ids.len();
            let num_blocks = len.div_ceil(BLOCK_LEN);
            if self.batch.num_rows() + len > self.chunk_len || first_block + num_blocks > self.blocks.len() {
                self.run()?;
                self.pool(out);
                first_block = 0;
            }
            if len > self.chunk_len {
                self.embed_long(text.ids)?;
                self.pool(out);
                continue;
            }
            let wanted = match self.info.pooling {
                Pooling::Mean => 0..len,
                Pooling::Cls => 0..1,
                Pooling::Last => len - 1..len,
            };
            self.num_wanted.push(wanted.len());
            let blocks = &self.blocks[first_block..first_block + num_blocks];
            // A text that is computed in one step needs no state after it.
            let (ids, state) = (ChunkIds::Tokens(text.ids), ChunkState::default());
            self.batch.push(Chunk { ids, first_position: 0, blocks, wanted, queries: &[], state }, BLOCK_LEN);
            first_block += num_blocks;
        }
        self.run()?;
        self.pool(out);
        Ok(())
    }
}
