//! Loads the layers with a dense MLP beside experts.

use super::{Loader, tensor_finder::ModulePath};
use crate::Error;
use crate::architectures::Blueprint;
use crate::config::Experts;
use crate::weights::{DenseAndExperts, MlpWeights, Norm};

impl Loader<'_> {
    pub(super) fn dense_and_experts(&mut self, layer: usize) -> Result<MlpWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let hidden = config.hidden_size;
        let Experts { num_experts, .. } = config.experts.expect("checked with the configuration");
        let name = self.finder.name(ModulePath::new(names.router_scale, layer), "");
        // The router's input is divided by the root of the hidden size as well.
        let factor = 1.0 / (hidden as f32).sqrt();
        let weight: Vec<f32> = self.floats(&name, hidden)?.iter().map(|scale| scale * factor).collect();
        let name = self.finder.name(ModulePath::new(names.expert_scales, layer), "");
        let scales = self.floats(&name, num_experts)?;
        Ok(MlpWeights::DenseAndExperts(Box::new(DenseAndExperts {
            dense: self.gated(layer)?,
            dense_output_norm: self.norm(ModulePath::new(names.dense_output_norm, layer), hidden)?,
            router_norm: Norm { weight: self.vector(&weight)?, bias: None },
            router: self.linear(ModulePath::new(names.router, layer), num_experts, hidden)?,
            expert_norm: self.norm(ModulePath::new(names.expert_norm, layer), hidden)?,
            experts: self.selected_experts(layer)?,
            expert_scales: self.vector(&scales)?,
            expert_output_norm: self.norm(ModulePath::new(names.expert_output_norm, layer), hidden)?,
        })))
    }
}
