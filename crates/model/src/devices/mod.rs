//! The devices that compute a model, and which of them has each part.
//!
//! A layer has two parts: its mixer, with keys and values, and its MLP or experts. The embedding is with the first
//! part, and the last norm and the output projection have a device of their own. The residual stream goes from device
//! to device, through the host; nothing else is shared. The results of a part do not depend on the devices of the
//! others, so devices with equal arithmetic give the bits of one of them.

mod part_bytes;

use std::ops::Range;
use std::sync::Arc;

use pellucid_tensor::{Backend, Extension};

use crate::config::Mixer;
use crate::{DecoderConfig, Error};

pub use part_bytes::PartBytes;

/// A device, as an index of a list of devices.
pub type DeviceIndex = usize;

/// The device of each part of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// For each layer, the device of its mixer, and of the norm before that.
    pub mixers: Vec<DeviceIndex>,
    /// For each layer, the device of its MLP or experts, and of the norm before them.
    pub mlps: Vec<DeviceIndex>,
    /// The device of the last norm and the output projection.
    pub output: DeviceIndex,
}

impl Placement {
    /// Places whole layers: the last ones and the output projection on device 0, those before them on device 1 and so
    /// on. `num_layers` has the number of each device.
    pub fn of_layers(num_layers: &[usize]) -> Placement {
        let devices = (0..num_layers.len()).rev();
        let mixers: Vec<_> = devices.flat_map(|device| std::iter::repeat_n(device, num_layers[device])).collect();
        Placement { mlps: mixers.clone(), mixers, output: 0 }
    }

    /// Places the experts of the first `num_layers` layers with experts on another device.
    #[must_use]
    pub fn with_experts_on(mut self, device: DeviceIndex, num_layers: usize, config: &DecoderConfig) -> Placement {
        let with_experts = (0..config.num_layers()).filter(|&layer| config.layer(layer).experts);
        with_experts.take(num_layers).for_each(|layer| self.mlps[layer] = device);
        self
    }

    /// Returns the layers whose mixers are on a device.
    pub fn layers_of(&self, device: DeviceIndex) -> impl Iterator<Item = usize> + '_ {
        (0..self.mixers.len()).filter(move |&layer| self.mixers[layer] == device)
    }

    /// Returns a layer that reads the keys and values of one on another device, and that layer.
    pub fn shared_across(&self, config: &DecoderConfig) -> Option<(usize, usize)> {
        let mut shared = (0..config.num_layers()).filter_map(|layer| Some((layer, config.layer(layer).kv_from?)));
        shared.find(|&(layer, from)| self.mixers[layer] != self.mixers[from])
    }

    /// Returns the device of the embedding.
    pub fn embedding(&self) -> DeviceIndex {
        self.mixers.first().copied().unwrap_or(self.output)
    }
}

/// The devices that compute a model.
#[derive(Debug, Clone)]
pub struct Devices {
    backends: Vec<Arc<dyn Backend>>,
    /// `None` if there is one device.
    placement: Option<Arc<Placement>>,
}

impl From<Arc<dyn Backend>> for Devices {
    fn from(backend: Arc<dyn Backend>) -> Devices {
        Devices { backends: vec![backend], placement: None }
    }
}

impl Devices {
    /// Returns devices with the parts of a model. Refuses a placement that the model cannot have.
    pub fn new(
        backends: Vec<Arc<dyn Backend>>,
        placement: Placement,
        config: &DecoderConfig,
    ) -> Result<Devices, Error> {
        assert_eq!([placement.mixers.len(), placement.mlps.len()], [config.num_layers(); 2]);
        let (mixers, mlps) = (&placement.mixers, &placement.mlps);
        assert!(mixers.iter().chain(mlps).chain([&placement.output]).all(|&device| device < backends.len()));
        if let Some((layer, from)) = placement.shared_across(config) {
            return Err(Error::SharedAcrossDevices { layer, from, num_layers: config.num_layers() });
        }
        let is_one = mixers.iter().chain(mlps).all(|&device| device == placement.output);
        if is_one {
            return Ok(Devices::from(backends[placement.output].clone()));
        }
        Ok(Devices { backends, placement: Some(Arc::new(placement)) })
    }

    /// Whether more than one device computes.
    pub fn are_several(&self) -> bool {
        self.placement.is_some()
    }

    /// Returns the placement of the parts; `None` if one device has them all.
    pub fn placement(&self) -> Option<&Placement> {
        self.placement.as_deref()
    }

    /// Returns the devices in their order.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        &self.backends
    }

    pub(crate) fn of_embedding(&self) -> DeviceIndex {
        self.placement().map_or(0, Placement::embedding)
    }

    pub(crate) fn of_mixer(&self, layer: usize) -> DeviceIndex {
        self.placement().map_or(0, |placement| placement.mixers[layer])
    }

    pub(crate) fn of_mlp(&self, layer: usize) -> DeviceIndex {
        self.placement().map_or(0, |placement| placement.mlps[layer])
    }

    pub(crate) fn of_output(&self) -> DeviceIndex {
        self.placement().map_or(0, |placement| placement.output)
    }

    /// Returns the device of the output projection, whose digests and logits the engine reads.
    pub fn output(&self) -> &Arc<dyn Backend> {
        &self.backends[self.of_output()]
    }

    /// Whether all devices have an operation that not every backend has.
    pub fn support(&self, extension: Extension) -> bool {
        self.backends.iter().all(|backend| backend.supports(extension))
    }

    /// Returns the parts of the model in the order in which they are computed, cut where the device changes. Layers
    /// without a mixer, or without an MLP, have parts in which nothing is computed, and which change no device.
    pub(crate) fn segments(&self, config: &DecoderConfig) -> Vec<(DeviceIndex, Range<Part>)> {
        let num_parts = 2 * config.num_layers() + 1;
        let device_of = |part: Part| {
            let layer = part / 2;
            match part % 2 {
                _ if part + 1 == num_parts => Some(self.of_output()),
                0 => (part == 0 || config.layer(layer).mixer != Mixer::None).then(|| self.of_mixer(layer)),
                _ => config.layer(layer).has_mlp.then(|| self.of_mlp(layer)),
            }
        };
        let mut segments: Vec<(DeviceIndex, Range<Part>)> = Vec::new();
        for part in 0..num_parts {
            let device = device_of(part);
            match segments.last_mut() {
                Some((current, parts)) if device.is_none_or(|device| device == *current) => parts.end = part + 1,
                _ => segments.push((device.expect("the first part has a device"), part..part + 1)),
            }
        }
        segments
    }
}

/// A part of a model: two for each layer, its mixer and its MLP, and the output after them.
pub(crate) type Part = usize;

/// The devices of the layers of a model, for the memory of keys, values and states.
pub trait LayerDevices {
    /// Returns the device that has the keys, values and states of a layer.
    fn of_layer(&self, layer: usize) -> &dyn Backend;
}

impl LayerDevices for Devices {
    fn of_layer(&self, layer: usize) -> &dyn Backend {
        &*self.backends[self.of_mixer(layer)]
    }
}

impl LayerDevices for dyn Backend + '_ {
    fn of_layer(&self, _layer: usize) -> &dyn Backend {
        self
    }
}
