//! Several devices for one model: which of them has which part, by their free memory or by number.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_engine::MemoryPlan;
use pellucid_model::{BLOCK_LEN, Decoder, DecoderConfig, LoadOptions, PartBytes, Placement};
use pellucid_tensor::Backend;

use super::{load_decoder_by, step_tokens};
use crate::{Device, DeviceError, DeviceOptions, Error, KvType, LoadEvent};

/// Part of a device's free memory that a plan fills with weights, keys and values. The rest is for scratch memory that
/// grows with use, and for errors of the plan.
const SHARE_OF_FREE: f64 = 0.92;

/// How the layers of a model are shared out among several devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Split {
    /// By free memory: each device gets as much as fits, in their order. Of a mixture of experts, the experts move to
    /// the last device before whole layers do.
    #[default]
    Auto,
    /// Whole layers, a number for each device. The first device has the last layers and the output.
    Layers(Vec<usize>),
    /// The experts of this number of layers, from the first on, on the last device; everything else on the first one.
    Experts(usize),
}

impl FromStr for Split {
    type Err = String;

    /// Reads `auto`, numbers of layers such as `24,8`, or `experts=N`.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected auto, numbers of layers such as 24,8, or experts=N, found {text:?}");
        if text == "auto" {
            return Ok(Split::Auto);
        }
        if let Some(number) = text.strip_prefix("experts=") {
            return number.parse().map(Split::Experts).map_err(|_| expected());
        }
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Split::Layers).map_err(|_| expected())
    }
}

/// The devices that compute a model together.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct DeviceGroup {
    /// The first device, and how devices compute.
    pub first: DeviceOptions,
    /// The devices after it.
    pub further: Vec<Device>,
    /// Which device has what.
    pub split: Split,
}

/// The needs of a model on devices beside its weights.
#[derive(Debug, Clone, Copy)]
pub struct DeviceNeed {
    /// Format of keys and values.
    pub kv_type: KvType,
    /// Maximum number of sequences.
    pub max_sequences: usize,
}

impl DeviceGroup {
    /// Returns a group in which further devices help the first one.
    pub fn new(first: DeviceOptions, further: Vec<Device>, split: Split) -> DeviceGroup {
        DeviceGroup { first, further, split }
    }

    /// Loads each part of a checkpoint onto its device. `backend` is the first device. With devices that were not
    /// named, and a model that is too large for the GPU, the CPU helps it.
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        options: LoadOptions,
        backend: &Arc<dyn Backend>,
        need: DeviceNeed,
        on_event: &mut dyn FnMut(LoadEvent),
    ) -> Result<Decoder, Error> {
        let failed = |source| Error::Load { path: checkpoint.path().to_owned(), source: Box::new(source) };
        let config = pellucid_model::read_config_with(checkpoint, options).map_err(failed)?;
        let is_free = matches!(self.first.device, None | Some(Device::Auto));
        let mut backends = vec![backend.clone()];
        if self.further.is_empty()
            && is_free
            && backend.is_asynchronous()
            && !SplitPlan::new(checkpoint, &config, &backends, need).fits_on_first(&**backend)?
        {
            backends.push(self.open(Device::Cpu, on_event)?);
        }
        for &device in &self.further {
            backends.push(self.open(device, on_event)?);
        }
        if backends.len() == 1 {
            return super::load_decoder(checkpoint, options, backend, on_event);
        }
        let plan = SplitPlan::new(checkpoint, &config, &backends, need);
        let placement = plan.place(&self.split, &backends)?;
        plan.notes(&placement, &backends).into_iter().for_each(|note| on_event(LoadEvent::Note(note)));
        load_decoder_by(checkpoint, options, backend, on_event, |progress| {
            Decoder::load_on(checkpoint, backends.clone(), placement, options, progress)
        })
    }

    fn open(&self, device: Device, on_event: &mut dyn FnMut(LoadEvent)) -> Result<Arc<dyn Backend>, Error> {
        let mut options = DeviceOptions { device: Some(device), ..self.first };
        if device == Device::Cpu {
            // These are about the kernels of GPUs.
            (options.fast, options.compile_kernels) = (false, false);
        }
        Ok(options.open(&mut |note| on_event(LoadEvent::Note(note)))?)
    }
}

/// A plan of which device has what: the sizes of all parts.
struct SplitPlan<'a> {
    config: &'a DecoderConfig,
    need: DeviceNeed,
    /// For each device, the bytes of the weights, which it may store in formats of its own.
    bytes: Vec<PartBytes>,
    /// For each layer, the bytes of the keys, values and states of one context.
    kv: Vec<u64>,
}

impl SplitPlan<'_> {
    fn new<'a>(
        checkpoint: &Checkpoint,
        config: &'a DecoderConfig,
        backends: &[Arc<dyn Backend>],
        need: DeviceNeed,
    ) -> SplitPlan<'a> {
        let num_blocks = config.context_len.div_ceil(BLOCK_LEN) as u64;
        let kv = |layer| {
            let block = config.kv_bytes_of_layer(layer, need.kv_type.dtype(), BLOCK_LEN);
            block.saturating_mul(num_blocks) + config.state_bytes_of_layer(layer) * 4 * need.max_sequences as u64
        };
        let bytes = backends.iter().map(|backend| PartBytes::of(checkpoint, config, &**backend)).collect();
        SplitPlan { config, need, bytes, kv: (0..config.num_layers()).map(kv).collect() }
    }

    /// Returns the free memory of a device without the scratch memory of a step; `None` if it is unknown.
    fn free(&self, backend: &dyn Backend) -> Result<Option<u64>, Error> {
        let Some(free) = backend.free_memory() else { return Ok(None) };
        let num_rows = step_tokens(backend, self.need.max_sequences);
        let scratch = pellucid_model::step_bytes(self.config, backend, num_rows, self.need.max_sequences)
            .map_err(|source| Error::Start(source.into()))?;
        Ok(Some(free.saturating_sub(scratch)))
    }

    /// Returns the bytes of weights, and of keys and values of one context, on a device.
    fn bytes_on(&self, device: usize, placement: &Placement) -> u64 {
        self.bytes[device].on(device, placement) + self.kv_on(device, placement)
    }

    fn kv_on(&self, device: usize, placement: &Placement) -> u64 {
        placement.layers_of(device).map(|layer| self.kv[layer]).sum()
    }

    /// Returns the bytes that must be free: keys and values may take only a part of what weights leave.
    fn needed_on(&self, device: usize, placement: &Placement) -> u64 {
        let kv = self.kv_on(device, placement) as f64;
        self.bytes[device].on(device, placement) + (kv / MemoryPlan::SHARE_OF_FREE) as u64
    }

    /// Whether the whole model can be loaded onto the first device.
    fn fits_on_first(&self, backend: &dyn Backend) -> Result<bool, Error> {
        let needed = self.needed_on(0, &self.whole(1));
        Ok(self.free(backend)?.is_none_or(|free| needed <= free))
    }

    fn place(&self, split: &Split, backends: &[Arc<dyn Backend>]) -> Result<Placement, Error> {
        let (num_layers, last) = (self.config.num_layers(), backends.len() - 1);
        match split {
            Split::Layers(numbers)
                if numbers.len() == backends.len() && numbers.iter().sum::<usize>() == num_layers =>
            {
                Ok(Placement::of_layers(numbers))
            }
            Split::Layers(numbers) => {
                let reason = format!(
                    "expected numbers of layers for {} devices, {num_layers} together, found {} numbers, {} together",
                    backends.len(),
                    numbers.len(),
                    numbers.iter().sum::<usize>()
                );
                Err(DeviceError::Split { reason }.into())
            }
            &Split::Experts(num) => {
                let with_experts = (0..num_layers).filter(|&layer| self.config.layers[layer].experts).count();
                if num > with_experts {
                    let reason = format!("expected at most the {with_experts} layers that have experts, found {num}");
                    return Err(DeviceError::Split { reason }.into());
                }
                Ok(self.whole(backends.len()).with_experts_on(last, num, self.config))
            }
            Split::Auto => self.by_memory(backends),
        }
    }

    /// Returns the placement of everything on the first device.
    fn whole(&self, num_devices: usize) -> Placement {
        let mut numbers = vec![0; num_devices];
        numbers[0] = self.config.num_layers();
        Placement::of_layers(&numbers)
    }

    /// Places the parts by the free memory of the devices.
    fn by_memory(&self, backends: &[Arc<dyn Backend>]) -> Result<Placement, Error> {
        let budget = |backend: &Arc<dyn Backend>| -> Result<Option<u64>, Error> {
            Ok(self.free(&**backend)?.map(|free| (free as f64 * SHARE_OF_FREE) as u64))
        };
        let budgets: Vec<Option<u64>> = backends.iter().map(budget).collect::<Result<_, _>>()?;
        let placement = self.fill(&budgets);
        let needed = |device: usize| self.needed_on(device, &placement);
        match (0..budgets.len()).find(|&device| budgets[device].is_some_and(|budget| needed(device) > budget)) {
            None => Ok(placement),
            Some(device) => Err(DeviceError::TooSmall {
                device: backends[device].description(),
                needed: needed(device),
                budget: budgets[device].unwrap_or(0),
                num_layers: placement.layers_of(device).count(),
            }
            .into()),
        }
    }

    /// Fills devices with these budgets of bytes, in their order. The last one gets what is left, even if that is more
    /// than it can have.
    fn fill(&self, budgets: &[Option<u64>]) -> Placement {
        let fits = |device: usize, placement: &Placement| {
            budgets[device].is_none_or(|budget| self.needed_on(device, placement) <= budget)
        };
        let (num_layers, last) = (self.config.num_layers(), budgets.len() - 1);
        let with_experts = (0..num_layers).filter(|&layer| self.config.layers[layer].experts).count();
        let whole = self.whole(budgets.len());
        for num in 0..=with_experts {
            let placement = whole.clone().with_experts_on(last, num, self.config);
            if (0..=last).all(|device| fits(device, &placement)) {
                return placement;
            }
        }
        let mut numbers = vec![0; budgets.len()];
        let mut left = num_layers;
        for device in 0..last {
            let of = |num: usize| {
                let mut numbers = numbers.clone();
                (numbers[device], numbers[last]) = (num, left - num);
                Placement::of_layers(&numbers)
            };
            // A layer that reads the keys and values of another one stays with it.
            let is_possible = |num: &usize| fits(device, &of(*num)) && of(*num).shared_across(self.config).is_none();
            numbers[device] = (0..=left).rev().find(is_possible).unwrap_or(0);
            left -= numbers[device];
        }
        numbers[last] = left;
        let mut placement = Placement::of_layers(&numbers);
        if numbers[0] == 0 && !fits(0, &placement) {
            placement.output = placement.mixers.last().copied().unwrap_or(last);
        }
        placement
    }

    /// Returns sentences on what went where, and what would hold the whole model.
    fn notes(&self, placement: &Placement, backends: &[Arc<dyn Backend>]) -> Vec<String> {
        let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
        let first = backends[0].description();
        let mut devices = placement.mixers.iter().chain(&placement.mlps).chain([&placement.output]);
        if devices.all(|&device| device == 0) {
            return vec![format!("the whole model is on {first}; the other devices are not used")];
        }
        let mut notes: Vec<String> = (backends.iter().enumerate())
            .map(|(device, backend)| {
                let (parts, bytes) = (PartsText { placement, device }, self.bytes_on(device, placement));
                format!("{}: {parts}; {} with keys and values of one context", backend.description(), gb(bytes))
            })
            .collect();
        let whole = self.bytes_on(0, &self.whole(backends.len()));
        let free = backends[0].free_memory().map_or_else(String::new, |free| format!(", of {} free", gb(free)));
        notes.push(format!("the whole model on {first} would take {}{free}", gb(whole)));
        notes
    }
}

/// The parts of a model on one device, in words.
struct PartsText<'a> {
    placement: &'a Placement,
    device: usize,
}

impl fmt::Display for PartsText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PartsText { placement, device } = *self;
        let all = |devices: &[usize]| -> Vec<usize> {
            (0..devices.len()).filter(|&layer| devices[layer] == device).collect()
        };
        let (mixers, mlps) = (all(&placement.mixers), all(&placement.mlps));
        let ranges = |layers: &[usize]| {
            let runs = layers.chunk_by(|layer, next| layer + 1 == *next);
            let texts = runs.map(|run| match run {
                [one] => one.to_string(),
                [first, .., last] => format!("{first} to {last}"),
                [] => String::new(),
            });
            texts.collect::<Vec<_>>().join(", ")
        };
        let plural = |layers: &[usize]| if layers.len() == 1 { "layer" } else { "layers" };
        let mut parts = Vec::new();
        if placement.embedding() == device {
            parts.push("the embedding".to_owned());
        }
        match (mixers == mlps, mixers.is_empty(), mlps.is_empty()) {
            (true, false, _) => parts.push(format!("{} {}", plural(&mixers), ranges(&mixers))),
            (true, true, _) => {}
            (false, ..) => {
                if !mixers.is_empty() {
                    parts.push(format!("attention of {} {}", plural(&mixers), ranges(&mixers)));
                }
                if !mlps.is_empty() {
                    parts.push(format!("experts or MLPs of {} {}", plural(&mlps), ranges(&mlps)));
                }
            }
        }
        if placement.output == device {
            parts.push("the output".to_owned());
        }
        f.write_str(&if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") })
    }
}

/// Describes the devices of a loaded model in words: with several, what each of them has.
pub fn description(decoder: &Decoder) -> String {
    let devices = decoder.devices();
    let Some(placement) = devices.placement() else { return decoder.backend().description() };
    let texts = devices
        .backends()
        .iter()
        .enumerate()
        .map(|(device, backend)| format!("{} with {}", backend.description(), PartsText { placement, device }));
    texts.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use pellucid_model::{QuantScheme, SyntheticModel};

    use super::*;

    #[test]
    fn reads_splits() {
        assert_eq!("auto".parse(), Ok(Split::Auto));
        assert_eq!("24,8".parse(), Ok(Split::Layers(vec![24, 8])));
        assert_eq!("experts=30".parse(), Ok(Split::Experts(30)));
        for wrong in ["", "24,", "a", "experts", "experts=", "-1,3", "experts=x"] {
            assert!(wrong.parse::<Split>().is_err(), "{wrong}");
        }
    }

    fn fill(shape: &str, budgets: &[u64]) -> Placement {
        let scheme = QuantScheme::named("q8_0").expect("a known scheme");
        let model = SyntheticModel::named(shape).expect("a known shape").miniature();
        let checkpoint = model.checkpoint(scheme, 1, &mut |_, _| ()).expect("a whole model");
        let options = LoadOptions { context_len: Some(64), ..LoadOptions::default() };
        let config = pellucid_model::read_config_with(&checkpoint, options).expect("a supported model");
        let need = DeviceNeed { kv_type: KvType::F16, max_sequences: 1 };
        let cpu = DeviceOptions { device: Some(Device::Cpu), threads: Some(1), ..DeviceOptions::default() };
        let backends = vec![cpu.open(&mut |_| ()).expect("every machine has a CPU"); budgets.len()];
        let plan = SplitPlan::new(&checkpoint, &config, &backends, need);
        let whole = plan.needed_on(0, &plan.whole(1));
        let stored: u64 = checkpoint.tensors().iter().map(|tensor| tensor.num_bytes() as u64).sum();
        assert!(whole >= stored, "every tensor belongs to a part");
        // In hundredths of the whole model.
        let budgets: Vec<Option<u64>> = budgets.iter().map(|percent| Some(whole * percent / 100 + 1)).collect();
        let placement = plan.fill(&budgets);
        let fits = |device: usize| Some(plan.needed_on(device, &placement)) <= budgets[device];
        assert!((0..budgets.len() - 1).all(fits), "only the last device may have too much");
        placement
    }

    #[test]
    fn devices_are_filled_in_their_order() {
        let num_layers = |shape: &str, budgets: &[u64]| -> Vec<usize> {
            let placement = fill(shape, budgets);
            assert_eq!(placement.mixers, placement.mlps);
            (0..budgets.len()).map(|device| placement.layers_of(device).count()).collect()
        };
        let all = num_layers("smollm2-135m", &[100, 100])[0];
        assert_eq!(num_layers("smollm2-135m", &[100, 100]), [all, 0]);
        assert_eq!(num_layers("smollm2-135m", &[0, 100]), [0, all]);
        let [first, second] = num_layers("smollm2-135m", &[90, 100])[..] else { unreachable!("two devices") };
        assert!(first > 0 && second > 0 && first + second == all, "{first} and {second} layers");
    }

    #[test]
    fn experts_move_before_layers() {
        let placement = fill("qwen3-30b-a3b", &[80, 100]);
        assert!(placement.mixers.iter().all(|&device| device == 0), "{placement:?}");
        assert_eq!(placement.mlps[0], 1, "{placement:?}");
        assert_eq!(placement.output, 0);
    }

    #[test]
    fn names_what_a_device_has() {
        let text = |placement: &Placement, device| PartsText { placement, device }.to_string();
        let layers = Placement::of_layers(&[3, 1, 0]);
        assert_eq!(text(&layers, 0), "layers 1 to 3, the output");
        assert_eq!(text(&layers, 1), "the embedding, layer 0");
        assert_eq!(text(&layers, 2), "nothing");
        let mut experts = Placement::of_layers(&[3, 0]);
        experts.mlps[..2].fill(1);
        assert_eq!(
            text(&experts, 0),
            "the embedding, attention of layers 0 to 2, experts or MLPs of layer 2, the output"
        );
        assert_eq!(text(&experts, 1), "experts or MLPs of layers 0 to 1");
    }
}
