//! The MLP of one layer: gated, plain, or a mixture of experts.

use pellucid_tensor::{Backend, Error, ExpertMlp};

use crate::DecoderConfig;
use crate::decoder::{Activations, Entry};
use crate::weights::MlpWeights;

/// Leaves its result in `update`.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &MlpWeights,
    entry: Entry<'_>,
    a: &mut Activations,
) -> Result<(), Error> {
    let input = entry.input(config, &a.update, &mut a.hidden, &mut a.normed);
    match weights {
        MlpWeights::Gated(mlp) => {
            let maps = [(&mlp.gate, &mut a.gate), (&mlp.up, &mut a.up)];
            backend.gated(input, maps, config.activation)?;
            backend.linear(&a.gate, &mlp.down, &mut a.update)?;
        }
        MlpWeights::Plain { up, down } => {
            backend.linear(backend.input(input)?, up, &mut a.up)?;
            backend.activate(config.activation, &mut a.up)?;
            backend.linear(&a.up, down, &mut a.update)?;
        }
        MlpWeights::Experts { router, experts } => {
            backend.linear(backend.input(input)?, router, &mut a.router)?;
            let routing = config.experts.expect("checked with the configuration").routing;
            let mlp =
                ExpertMlp { x: &a.normed, router_logits: &a.router, routing, experts, activation: config.activation };
            backend.expert_mlp(mlp, &mut a.update)?;
        }
    }
    Ok(())
}
