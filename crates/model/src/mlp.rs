//! The MLP of one layer: gated, plain, or a mixture of experts.

use pellucid_tensor::{Backend, Error, ExpertMlp};

use crate::DecoderConfig;
use crate::decoder::Activations;
use crate::weights::MlpWeights;

/// Reads `normed`, leaves its result in `update`.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &MlpWeights,
    a: &mut Activations,
) -> Result<(), Error> {
    match weights {
        MlpWeights::Gated(mlp) => {
            let maps = [(&mlp.gate, &mut a.gate), (&mlp.up, &mut a.up)];
            backend.gated(&a.normed, maps, config.activation)?;
            backend.linear(&a.gate, &mlp.down, &mut a.update)?;
        }
        MlpWeights::Plain { up, down } => {
            backend.linear(&a.normed, up, &mut a.up)?;
            backend.activate(config.activation, &mut a.up)?;
            backend.linear(&a.up, down, &mut a.update)?;
        }
        MlpWeights::Experts { router, experts } => {
            backend.linear(&a.normed, router, &mut a.router)?;
            let routing = config.experts.expect("checked with the configuration").routing;
            let mlp =
                ExpertMlp { x: &a.normed, router_logits: &a.router, routing, experts, activation: config.activation };
            backend.expert_mlp(mlp, &mut a.update)?;
        }
    }
    Ok(())
}
