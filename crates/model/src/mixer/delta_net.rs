//! The gated delta net of one layer: project to queries, keys, values and gates, run the recurrence, project. A rank
//! has its own heads, with their channels of the convolution and their part of the states.

use pellucid_tensor::{Backend, DeltaNet, Error, RmsNorm, Tensor};

use crate::activations::{Activations, Entry, output};
use crate::ranks::{Columns, project};
use crate::weights::{DeltaNetWeights, Norm};
use crate::{Batch, DecoderConfig};

/// Writes its result to the residual stream, or to `update` if an output norm follows.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &DeltaNetWeights,
    batch: &Batch,
    states: &mut Tensor,
    (entry, output_norm): (Entry<'_>, Option<&Norm>),
    a: &mut Activations,
) -> Result<(), Error> {
    let mut maps = [
        (&weights.input, &mut a.recurrent_input),
        (&weights.gate, &mut a.recurrent_gate),
        (&weights.beta, &mut a.delta_beta),
        (&weights.time_step, &mut a.time_step),
    ];
    backend.linears(entry.input(config, &mut a.residual, &mut a.normed), &mut maps)?;
    let call = DeltaNet {
        shape: config.delta_net.expect("checked with the configuration"),
        order: weights.order,
        projected: &a.recurrent_input,
        gate: &a.recurrent_gate,
        beta: &a.delta_beta,
        time_step: &a.time_step,
        taps: &weights.taps,
        decay: &weights.decay,
        time_bias: &weights.time_bias,
        norm: RmsNorm { weight: &weights.norm, eps: config.norm_eps },
        sequences: &batch.sequences,
        states: &batch.states,
        saves: &batch.saves,
    };
    backend.delta_net(call, states, &mut a.recurrent_output)?;
    let rows = (&a.recurrent_output, Columns::RecurrentOutput);
    project(backend, a.ranks.as_deref_mut(), rows, &weights.output, output(&mut a.residual, output_norm))
}
