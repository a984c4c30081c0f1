//! The MLP of one layer: gated, ungated, or a mixture of experts.

use pellucid_tensor::{Backend, Error, ExpertMlp, GatedMlpCall, Input, Output};

use crate::DecoderConfig;
use crate::activations::{Activations, Entry, output};
use crate::weights::{MlpWeights, Norm};

/// Writes its result to the residual stream, or to `update` if an output norm follows.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &MlpWeights,
    (entry, output_norm): (Entry<'_>, Option<&Norm>),
    a: &mut Activations,
) -> Result<(), Error> {
    match weights {
        MlpWeights::Gated(mlp) if matches!(entry, Entry::Stream) => {
            let input = Input::Rows(&a.residual.hidden);
            let maps = [(&mlp.gate, &mut a.gate), (&mlp.up, &mut a.up)];
            backend.gated(input, maps, config.activation)?;
            backend.linear_to(&a.gate, &mlp.down, output(&mut a.residual, output_norm))
        }
        MlpWeights::Gated(mlp) => {
            let call = GatedMlpCall {
                mlp,
                activation: config.activation,
                norm: entry.norm(config),
                normed: &mut a.normed,
                gate: &mut a.gate,
                up: &mut a.up,
                adds_to_stream: output_norm.is_none(),
            };
            backend.gated_mlp(call, &mut a.residual)
        }
        MlpWeights::Plain { up, down } => {
            let input = entry.input(config, &mut a.residual, &mut a.normed);
            backend.linears(input, &mut [(up, &mut a.up)])?;
            backend.activate(config.activation, &mut a.up)?;
            backend.linear_to(&a.up, down, output(&mut a.residual, output_norm))
        }
        MlpWeights::Experts { router, score_bias, experts, shared } => {
            let input = entry.input(config, &mut a.residual, &mut a.normed);
            backend.linears(input, &mut [(router, &mut a.router)])?;
            let routing = config.experts.expect("checked with the configuration").routing;
            let mlp = ExpertMlp {
                x: &a.normed,
                router_logits: &a.router,
                routing,
                score_bias: score_bias.as_ref(),
                experts,
                activation: config.activation,
            };
            let Some(shared) = shared else { return backend.expert_mlp(mlp, output(&mut a.residual, output_norm)) };
            backend.expert_mlp(mlp, Output::Rows(&mut a.residual.update))?;
            let maps = [(&shared.gate, &mut a.shared_gate), (&shared.up, &mut a.shared_up)];
            backend.gated(Input::Rows(&a.normed), maps, config.activation)?;
            backend.linear(&a.shared_gate, &shared.down, &mut a.shared_output)?;
            // Marks the update as pending, unless a norm reads it first.
            backend.add(&a.shared_output, output(&mut a.residual, output_norm).rows())
        }
    }
}
