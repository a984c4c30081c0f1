//! Loads the inputs that each layer gets in addition, and the factors of layers.

use super::{Loader, tensor_finder::ModulePath};
use crate::Error;
use crate::architectures::Blueprint;
use crate::layer_input::SUM_SCALE;
use crate::weights::{LayerInputTables, LayerInputWeights};

impl Loader<'_> {
    pub(super) fn layer_input_tables(&mut self, size: usize) -> Result<LayerInputTables, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let all = size * config.num_layers();
        let name = self.finder.name(ModulePath::new(names.layer_input_table, 0), "weight");
        let table = self.host(&name, config.vocab_size, all)?;
        Ok(LayerInputTables {
            table: self.backend.weight(table)?,
            projection: self.linear(ModulePath::new(names.layer_inputs, 0), all, config.hidden_size)?,
            norm: self.scaled_norm(ModulePath::new(names.layer_inputs_norm, 0), size, SUM_SCALE)?,
        })
    }

    pub(super) fn layer_input(&mut self, layer: usize, size: usize) -> Result<LayerInputWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let hidden = config.hidden_size;
        Ok(LayerInputWeights {
            gate: self.linear(ModulePath::new(names.layer_input_gate, layer), size, hidden)?,
            projection: self.linear(ModulePath::new(names.layer_input_output, layer), hidden, size)?,
            norm: self.norm(ModulePath::new(names.layer_input_norm, layer), hidden)?,
        })
    }

    pub(super) fn layer_scale(&mut self, layer: usize) -> Result<f32, Error> {
        let name = self.finder.weight_or_bare(ModulePath::new(self.blueprint.names.layer_scale, layer));
        Ok(self.floats(&name, 1)?[0])
    }
}
