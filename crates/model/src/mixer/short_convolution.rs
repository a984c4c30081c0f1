//! The short convolution of one layer: project to two gates and an input, convolve, project. A rank has its own
//! channels.

use pellucid_tensor::{Backend, Error, ShortConvolution, Tensor};

use crate::activations::{Activations, Entry, output};
use crate::ranks::{Columns, project};
use crate::weights::{Norm, ShortConvolutionWeights};
use crate::{Batch, DecoderConfig};

/// Writes its result to the residual stream, or to `update` if an output norm follows.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &ShortConvolutionWeights,
    batch: &Batch,
    states: &mut Tensor,
    (entry, output_norm): (Entry<'_>, Option<&Norm>),
    a: &mut Activations,
) -> Result<(), Error> {
    let input = entry.input(config, &mut a.residual, &mut a.normed);
    backend.linears(input, &mut [(&weights.input, &mut a.recurrent_input)])?;
    let call = ShortConvolution {
        projected: &a.recurrent_input,
        taps: &weights.taps,
        bias: weights.bias.as_ref(),
        sequences: &batch.sequences,
        states: &batch.states,
        saves: &batch.saves,
    };
    backend.short_convolution(call, states, &mut a.recurrent_output)?;
    let rows = (&a.recurrent_output, Columns::RecurrentOutput);
    project(backend, a.ranks.as_deref_mut(), rows, &weights.output, output(&mut a.residual, output_norm))
}
