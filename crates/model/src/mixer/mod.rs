//! The part of a layer that mixes positions: attention, or a recurrence.

pub(crate) mod attention;
mod delta_net;
mod latent_attention;
mod mamba2;
mod short_convolution;

use pellucid_tensor::{Backend, Error};

use crate::activations::{Activations, Entry};
use crate::weights::{MixerWeights, Norm};
use crate::{Batch, DecoderConfig, KvMemory};

use attention::LayerMemory;

/// Runs the mixer of layer `index`. Writes its result to the residual stream, or to `update` if an output norm follows.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    (index, weights): (usize, &MixerWeights),
    batch: &Batch,
    kv: &mut KvMemory,
    norms: (Entry<'_>, Option<&Norm>),
    a: &mut Activations,
) -> Result<(), Error> {
    match weights {
        MixerWeights::Attention(weights) => {
            let block_len = kv.block_len();
            let stored_in = config.layer(index).kv_from.unwrap_or(index);
            let places = batch.places(kv.is_windowed(stored_in));
            let memory = LayerMemory { index, layer: &mut kv.layers[stored_in], places, block_len };
            attention::forward(backend, config, weights, batch, memory, norms, a)
        }
        MixerWeights::LatentAttention(weights) => {
            let block_len = kv.block_len();
            let places = batch.places(false);
            let memory = LayerMemory { index, layer: &mut kv.layers[index], places, block_len };
            latent_attention::forward(backend, config, weights, batch, memory, norms, a)
        }
        MixerWeights::ShortConvolution(weights) => {
            let states = kv.states[index].as_mut().expect("a layer with a recurrence has states");
            short_convolution::forward(backend, config, weights, batch, states, norms, a)
        }
        MixerWeights::DeltaNet(weights) => {
            let states = kv.states[index].as_mut().expect("a layer with a recurrence has states");
            delta_net::forward(backend, config, weights, batch, states, norms, a)
        }
        MixerWeights::Mamba2(weights) => {
            let states = kv.states[index].as_mut().expect("a layer with a recurrence has states");
            mamba2::forward(backend, config, weights, batch, states, norms, a)
        }
    }
}
