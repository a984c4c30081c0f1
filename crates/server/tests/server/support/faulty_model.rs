//! A model for tests whose steps misbehave when they are told to.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use pellucid_model::{AttentionRows, Batch, Decoder, DecoderConfig, Error, KvMemory, Logits, Model, ProbeQuery};
use pellucid_tensor::Error as DeviceError;

/// A model whose steps can be delayed, held up, and made to fail.
pub(super) struct FaultyModel {
    pub(super) model: Decoder,
    pub(super) faults: Arc<Faults>,
}

/// How the steps of a [`FaultyModel`] misbehave.
pub struct Faults {
    pub(super) delay_ms: AtomicU64,
    /// Logits of this and later positions are NaN.
    pub(super) nan_from: AtomicU32,
    /// 0, [`NO_MEMORY`] or [`LOST_DEVICE`].
    pub(super) failure: AtomicU32,
    /// While true, steps wait.
    pub(super) is_held: Mutex<bool>,
    pub(super) released: Condvar,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults {
            delay_ms: AtomicU64::new(0),
            nan_from: AtomicU32::new(u32::MAX),
            failure: AtomicU32::new(0),
            is_held: Mutex::new(false),
            released: Condvar::new(),
        }
    }
}

/// Errors that steps can be made to return.
pub const NO_MEMORY: u32 = 1;
pub const LOST_DEVICE: u32 = 2;

impl Model for FaultyModel {
    fn config(&self) -> &DecoderConfig {
        self.model.config()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        std::thread::sleep(Duration::from_millis(self.faults.delay_ms.load(Ordering::Relaxed)));
        drop(self.faults.released.wait_while(self.faults.is_held.lock().unwrap(), |is_held| *is_held).unwrap());
        let device = "a device for tests".to_owned();
        match self.faults.failure.load(Ordering::Relaxed) {
            NO_MEMORY => return Err(DeviceError::OutOfMemory { device, bytes: 1 << 30 }.into()),
            LOST_DEVICE => {
                return Err(DeviceError::Lost { device, operation: "a step", reason: "unplugged".into() }.into());
            }
            _ => {}
        }
        self.model.forward(batch, kv, logits)?;
        let vocab_size = self.config().vocab_size;
        let nan_from = self.faults.nan_from.load(Ordering::Relaxed);
        let values = logits.resize(batch.num_wanted(), vocab_size);
        for (row, values) in batch.wanted().iter().zip(values.chunks_exact_mut(vocab_size)) {
            if batch.positions()[*row as usize] >= nan_from {
                values.fill(f32::NAN);
            }
        }
        Ok(())
    }

    fn probe(
        &mut self,
        batch: &Batch,
        kv: &mut KvMemory,
        query: &ProbeQuery,
        on_layer: &mut dyn FnMut(&[f32]),
    ) -> Result<Option<AttentionRows>, Error> {
        self.model.probe(batch, kv, query, on_layer)
    }
}
