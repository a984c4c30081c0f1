//! The Mamba-2 mixer of one layer: project to inputs, gate and time steps, run the recurrence, project. A rank has its
//! own heads, with their inputs, their part of the states, and B and C of their groups. A norm over outputs of several
//! ranks is computed of the gathered outputs.

use pellucid_tensor::{Backend, Error, Mamba2, RmsNorm, Tensor};

use crate::activations::{Activations, Entry, output};
use crate::config::Mamba2Config;
use crate::ranks::{Columns, project};
use crate::weights::{Mamba2Weights, Norm};
use crate::{Batch, DecoderConfig};

/// Writes its result to the residual stream, or to `update` if an output norm follows.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &Mamba2Weights,
    batch: &Batch,
    states: &mut Tensor,
    (entry, output_norm): (Entry<'_>, Option<&Norm>),
    a: &mut Activations,
) -> Result<(), Error> {
    let Mamba2Config { shape, time_limits } = config.mamba2.expect("checked with the configuration");
    let mut maps = [
        (&weights.input, &mut a.recurrent_input),
        (&weights.gate, &mut a.recurrent_gate),
        (&weights.time_step, &mut a.time_step),
    ];
    backend.linears(entry.input(config, &mut a.residual, &mut a.normed), &mut maps)?;
    let norm = RmsNorm { weight: &weights.norm, eps: config.norm_eps };
    let norm_spans_ranks = weights.norm.len() > shape.output_size();
    let call = Mamba2 {
        shape,
        projected: &a.recurrent_input,
        gate: &a.recurrent_gate,
        time_step: &a.time_step,
        taps: &weights.taps,
        bias: weights.bias.as_ref(),
        decay: &weights.decay,
        time_bias: &weights.time_bias,
        time_limits,
        skip: &weights.skip,
        norm: (!norm_spans_ranks).then_some(norm),
        sequences: &batch.sequences,
        states: &batch.states,
        saves: &batch.saves,
    };
    backend.mamba2(call, states, &mut a.recurrent_output)?;
    let (ranks, rows) = (a.ranks.as_deref_mut(), (&a.recurrent_output, Columns::RecurrentOutput));
    let out = output(&mut a.residual, output_norm);
    match ranks {
        Some(ranks) if norm_spans_ranks => {
            ranks.project_normed(backend, rows, (norm, shape.norm_size), &weights.output, out)
        }
        ranks => project(backend, ranks, rows, &weights.output, out),
    }
}
