//! A model whose logits are a pure function of the preceding tokens, which it reads back from the KV memory.
//!
//! It stores each token's id as its key, and computes logits from the ids that it finds through the block tables. A
//! wrong block, a missing copy, a stale slot or tokens of another request therefore change its output. The expected
//! output needs no engine.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pellucid_cpu::{CpuBackend, CpuOptions, Isa};
use pellucid_model::{Batch, DecoderConfig, Error, KvMemory, LayerConfig, Logits, MlpKind, Model, NormKind, Positions};
use pellucid_sampling::OwnedDigest;
use pellucid_selftest::suites::digests::digest_query;
use pellucid_tensor::{
    Activation, Backend, Error as DeviceError, HeadShape, RowDigest, RowQuery, StoreKv, Tensor, TokenSlots, TokenSource,
};

use crate::VirtualClock;

/// A model for tests of the engine; see the head of this file.
#[derive(Debug)]
pub struct FakeModel {
    config: DecoderConfig,
    backend: Arc<CpuBackend>,
    /// The ids in KV memory, as last read.
    stored: Vec<f32>,
    /// The ids in the memory of the layer with a window, if it has blocks of its own.
    stored_in_windows: Vec<f32>,
    keys: Tensor,
    /// A sequence that contains this id gets NaN logits.
    pub poison: Option<u32>,
    /// A batch that contains this id makes the model panic.
    pub bomb: Option<u32>,
    /// Return digests with this many tokens, if every row of the batch allows a digest.
    pub digest_len: Option<usize>,
    /// Whether the model imitates an asynchronous device.
    pub is_asynchronous: bool,
    /// Every `wrong_every`th digest assumes a wrong token, or none.
    pub wrong_every: Option<usize>,
    /// The step with this number fails when it is waited for.
    pub fails_at: Option<usize>,
    /// The device is lost when the step with this number is waited for.
    pub lost_at: Option<usize>,
    /// The clock that each step advances. That of an asynchronous model advances when a step is waited for.
    pub clock: Option<VirtualClock>,
    /// Virtual times at which the launched steps end, oldest first.
    ends: VecDeque<Duration>,
    /// The rows of the last launched step, if it returned digests.
    rows: Vec<Vec<f32>>,
    /// The assumed tokens of the last launched step.
    assumed: Vec<u32>,
    /// The tokens that the fake device keeps. Models that share them are on the same device.
    pub slots: Arc<Mutex<FakeSlots>>,
    num_digests: usize,
    /// Number of whole rows that were returned or read.
    pub num_whole_rows: Arc<AtomicUsize>,
    num_launched: usize,
    num_finished: usize,
}

/// Slots of a fake device for tokens.
#[derive(Debug, Default)]
pub struct FakeSlots {
    /// The slots that models report.
    pub size: TokenSlots,
    /// Number of times that tokens were fetched.
    pub num_fetches: usize,
    kept: Vec<Vec<u32>>,
    fetched: Vec<u32>,
}

impl FakeSlots {
    /// Slots of this number and length, all empty.
    pub fn new(size: TokenSlots) -> FakeSlots {
        FakeSlots { size, ..FakeSlots::default() }
    }
}

impl FakeModel {
    pub fn new(vocab_size: usize, context_len: usize) -> FakeModel {
        let config = DecoderConfig {
            architecture: "fake".into(),
            leaves_out_images: false,
            leaves_out_audio: false,
            vocab_size,
            hidden_size: 1,
            num_heads: 1,
            num_kv_heads: 1,
            head_size: 1,
            mlp_size: 1,
            context_len,
            norm: NormKind::Rms,
            norm_eps: 1e-5,
            input_norms: true,
            output_norms: false,
            qk_norm: None,
            value_norm: false,
            positions: Positions::Learned,
            mlp: MlpKind::Plain,
            activation: Activation::Silu,
            experts: None,
            dense_beside_experts: false,
            layer_input_size: None,
            layer_scales: false,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logits_divisor: 1.0,
            attention_scale: 1.0,
            attention_soft_cap: None,
            attention_sinks: false,
            attention_gate: false,
            latent_attention: None,
            logits_soft_cap: None,
            short_convolution: None,
            delta_net: None,
            mamba2: None,
            expert_input_size: None,
            num_ranks: 1,
            layers: vec![LayerConfig::PLAIN],
            predictor: None,
        };
        let backend = CpuBackend::new(CpuOptions { num_threads: 1, isa: Isa::Scalar }).expect("scalar is always there");
        let keys = backend.zeros(pellucid_tensor::DType::F32, 0, 1).expect("no memory at all");
        FakeModel {
            config,
            backend: Arc::new(backend),
            stored: Vec::new(),
            stored_in_windows: Vec::new(),
            keys,
            poison: None,
            bomb: None,
            digest_len: None,
            is_asynchronous: false,
            wrong_every: None,
            fails_at: None,
            lost_at: None,
            clock: None,
            ends: VecDeque::new(),
            rows: Vec::new(),
            assumed: Vec::new(),
            slots: Arc::default(),
            num_digests: 0,
            num_whole_rows: Arc::default(),
            num_launched: 0,
            num_finished: 0,
        }
    }

    /// Returns the model with a second layer that has a sliding window. It takes the last `len` ids from there.
    #[must_use]
    pub fn with_window(mut self, len: usize) -> FakeModel {
        self.config.layers.push(LayerConfig { window: Some(len), ..LayerConfig::PLAIN });
        self
    }

    pub fn backend(&self) -> Arc<CpuBackend> {
        self.backend.clone()
    }

    fn slots(&self) -> MutexGuard<'_, FakeSlots> {
        self.slots.lock().expect("no test panics while it holds the slots")
    }

    /// Returns the logits after these tokens.
    pub fn logits_after(tokens: impl Iterator<Item = u32>, vocab_size: usize) -> Vec<f32> {
        let hash = tokens.fold(0xCBF2_9CE4_8422_2325u64, |hash, token| {
            (hash ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23)
        });
        (0..vocab_size as u64)
            .map(|token| {
                let mixed = (hash ^ token.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                ((mixed >> 40) as f32 / (1u64 << 24) as f32) * 6.0
            })
            .collect()
    }
}

impl FakeModel {
    /// Begins a step in virtual time, after those that were launched before it.
    fn start_clock(&mut self, batch: &Batch) {
        let Some(clock) = &self.clock else { return };
        let begin = self.ends.back().copied().unwrap_or_default().max(clock.elapsed());
        self.ends.push_back(begin + clock.duration_of(batch));
        if !self.is_asynchronous {
            self.wait_for_step();
        }
    }

    /// Waits in virtual time for the oldest step.
    fn wait_for_step(&mut self) {
        if let (Some(clock), Some(end)) = (&self.clock, self.ends.pop_front()) {
            clock.wait_until(end);
        }
    }

    /// Computes the logits of a row from the ids that its block table leads to.
    fn row(&self, batch: &Batch, row: usize, block_len: usize) -> Vec<f32> {
        let vocab_size = self.config.vocab_size;
        let sequence = batch.sequences().iter().find(|sequence| sequence.rows.contains(&row)).expect("an owner");
        let last = batch.positions()[row] as usize;
        let window = self.config.kv_window().filter(|_| !self.stored_in_windows.is_empty());
        let window_begin = window.map_or(usize::MAX, |len| (last + 1).saturating_sub(len));
        let token = |position: usize| {
            let is_in_window = position >= window_begin;
            let tables = if is_in_window { batch.window_tables() } else { batch.block_tables() };
            let stored = if is_in_window { &self.stored_in_windows } else { &self.stored };
            let block = tables[sequence.blocks.clone()][position / block_len] as usize;
            stored[block * block_len + position % block_len] as u32
        };
        let positions = 0..=last;
        if self.poison.is_some_and(|poison| positions.clone().any(|position| token(position) == poison)) {
            return vec![f32::NAN; vocab_size];
        }
        FakeModel::logits_after(positions.map(token), vocab_size)
    }
}

impl Model for FakeModel {
    fn config(&self) -> &DecoderConfig {
        &self.config
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.launch(batch, kv, logits)?;
        self.finish(logits)
    }

    fn launch(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        assert!(self.num_launched - self.num_finished < 2, "at most two steps are in flight");
        let token = |&id: &TokenSource| match id {
            TokenSource::Token(token) => token,
            TokenSource::Assumed { row } => self.assumed[row as usize],
            TokenSource::Kept { slot, row } => self.slots().kept[slot as usize][row as usize],
        };
        let ids: Vec<u32> = batch.ids().iter().map(token).collect();
        if let Some(bomb) = self.bomb {
            assert!(!ids.contains(&bomb), "the bomb went off");
        }
        let block_len = kv.block_len();
        let shape = HeadShape { num_heads: 1, num_kv_heads: 1, head_size: 1, block_len };
        self.backend.resize_rows(&mut self.keys, batch.num_rows())?;
        let ids: Vec<f32> = ids.iter().map(|&id| id as f32).collect();
        self.backend.write(&ids, &mut self.keys)?;
        let store = StoreKv { keys: &self.keys, values: &self.keys, slots: batch.slots(), shape };
        self.backend.store_kv(store, &mut kv.layers[0])?;
        self.stored.resize(kv.num_blocks() * block_len, 0.0);
        self.backend.read(&kv.layers[0].keys, &mut self.stored)?;
        if !batch.window_slots().is_empty() {
            let store = StoreKv { keys: &self.keys, values: &self.keys, slots: batch.window_slots(), shape };
            self.backend.store_kv(store, &mut kv.layers[1])?;
            self.stored_in_windows.resize(kv.layers[1].keys.len(), 0.0);
            self.backend.read(&kv.layers[1].keys, &mut self.stored_in_windows)?;
        }

        self.num_launched += 1;
        self.start_clock(batch);
        let rows: Vec<Vec<f32>> = batch.wanted().iter().map(|&row| self.row(batch, row as usize, block_len)).collect();
        if let Some(len) = self.digest_len.filter(|_| batch.queries().iter().all(Option::is_some)) {
            let digests = logits.resize_digests(rows.len());
            self.assumed.clear();
            for ((digest, query), row) in digests.iter_mut().zip(batch.queries()).zip(&rows) {
                *digest = digest_of(row, query.as_ref().expect("looked at above"), len);
                self.num_digests += 1;
                if self.wrong_every.is_some_and(|every| self.num_digests.is_multiple_of(every)) {
                    let wrong = |token: u32| (token + 1) % row.len() as u32;
                    digest.assumed = digest.assumed.map(wrong).filter(|_| self.num_digests.is_multiple_of(2));
                }
                self.assumed.push(digest.assumed.unwrap_or(0));
            }
            self.rows = rows;
            return Ok(());
        }
        self.num_whole_rows.fetch_add(rows.len(), Ordering::Relaxed);
        let vocab_size = self.config.vocab_size;
        logits.resize(rows.len(), vocab_size).copy_from_slice(&rows.concat());
        Ok(())
    }

    fn finish(&mut self, _logits: &mut Logits) -> Result<(), Error> {
        self.wait_for_step();
        let number = Some(self.num_finished);
        self.num_finished += 1;
        let device = "fake device".to_owned();
        if self.lost_at == number {
            return Err(DeviceError::Lost { device, operation: "a step", reason: "it is gone".into() }.into());
        }
        if self.fails_at == number {
            return Err(DeviceError::OutOfMemory { device, bytes: 1 << 30 }.into());
        }
        Ok(())
    }

    fn is_asynchronous(&self, _num_rows: usize) -> bool {
        self.is_asynchronous
    }

    fn supports_digests(&self) -> bool {
        self.digest_len.is_some()
    }

    fn token_slots(&self) -> TokenSlots {
        self.slots().size
    }

    fn launch_draft(&mut self, batch: &Batch, kv: &mut KvMemory, slot: usize) -> Result<(), Error> {
        self.launch(batch, kv, &mut Logits::default())?;
        self.wait_for_step();
        self.num_finished += 1;
        let mut slots = self.slots();
        assert!(slot < slots.size.num_slots && self.assumed.len() <= slots.size.num_rows, "a slot for the tokens");
        let num_slots = slots.size.num_slots;
        slots.kept.resize(num_slots, Vec::new());
        slots.kept[slot].clone_from(&self.assumed);
        Ok(())
    }

    fn fetch_drafts(&mut self, num_slots: usize) -> Result<(), Error> {
        let mut slots = self.slots();
        slots.num_fetches += 1;
        let num_rows = slots.size.num_rows;
        // A device copies the tokens that were never kept as well.
        let tokens = |kept: &Vec<u32>| (0..num_rows).map(|row| kept.get(row).copied().unwrap_or(u32::MAX)).collect();
        slots.fetched = slots.kept[..num_slots].iter().flat_map::<Vec<u32>, _>(tokens).collect();
        Ok(())
    }

    fn read_drafts(&mut self, out: &mut Vec<u32>) -> Result<(), Error> {
        out.extend_from_slice(&self.slots().fetched);
        Ok(())
    }

    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        assert_eq!(self.num_launched, self.num_finished, "the next step has overwritten the rows of this one");
        self.num_whole_rows.fetch_add(1, Ordering::Relaxed);
        out.copy_from_slice(&self.rows[row]);
        Ok(())
    }
}

/// Returns the digest that a device would compute for a row.
fn digest_of(row: &[f32], query: &RowQuery, len: usize) -> RowDigest {
    match OwnedDigest::of(row, &digest_query(query), len) {
        Some(OwnedDigest { top, has_all, totals, finalists, assumed, .. }) => {
            RowDigest { is_plain: true, top, has_all, totals, finalists, assumed }
        }
        None => RowDigest::default(),
    }
}
