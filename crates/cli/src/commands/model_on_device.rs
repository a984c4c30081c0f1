//! A model on its device, for several engines that run one after the other: `prove` and `bench --tasks` compare them.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use pellucid_engine::{Engine, EngineOptions};
use pellucid_model::{Batch, DecoderConfig, Devices, Error, KvMemory, Logits, Model};
use pellucid_tensor::Backend;

/// A model that several engines use, one after the other: an [`Engine`] owns its model.
struct SharedModel {
    config: DecoderConfig,
    devices: Option<Devices>,
    model: Arc<Mutex<dyn Model>>,
}

impl Model for SharedModel {
    fn config(&self) -> &DecoderConfig {
        &self.config
    }

    fn placed_on(&self) -> Option<&Devices> {
        self.devices.as_ref()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.model.lock().expect("one engine runs at a time").forward(batch, kv, logits)
    }

    fn launch(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.model.lock().expect("one engine runs at a time").launch(batch, kv, logits)
    }

    fn finish(&mut self, logits: &mut Logits) -> Result<(), Error> {
        self.model.lock().expect("one engine runs at a time").finish(logits)
    }

    fn is_asynchronous(&self, num_rows: usize) -> bool {
        self.model.lock().expect("one engine runs at a time").is_asynchronous(num_rows)
    }

    fn supports_digests(&self) -> bool {
        self.model.lock().expect("one engine runs at a time").supports_digests()
    }

    fn predict(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.model.lock().expect("one engine runs at a time").predict(batch, kv, logits)
    }

    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        self.model.lock().expect("one engine runs at a time").read_row(row, out)
    }
}

/// A model with the backend that holds its weights.
pub(crate) struct ModelOnDevice {
    config: DecoderConfig,
    devices: Option<Devices>,
    model: Arc<Mutex<dyn Model>>,
    backend: Arc<dyn Backend>,
}

impl ModelOnDevice {
    pub(crate) fn new(model: impl Model + 'static, backend: Arc<dyn Backend>) -> ModelOnDevice {
        let (config, devices) = (model.config().clone(), model.placed_on().cloned());
        ModelOnDevice { config, devices, model: Arc::new(Mutex::new(model)), backend }
    }

    pub(crate) fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    /// Creates an engine with KV memory of its own.
    pub(crate) fn engine(&self, options: EngineOptions) -> Result<Engine> {
        Ok(Engine::new(self.share(), self.backend.clone(), options)?)
    }

    /// Returns the model for one more engine.
    pub(crate) fn share(&self) -> Box<dyn Model> {
        let (config, devices) = (self.config.clone(), self.devices.clone());
        Box::new(SharedModel { config, devices, model: self.model.clone() })
    }
}
