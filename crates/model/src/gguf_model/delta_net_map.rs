//! Maps the tensors of gated delta nets. Readers of some files expect another order of value heads than folders have.

use pellucid_tensor::{DeltaNetShape, ValueHeadOrder};

use super::recipe::TensorRecipe;
use super::tensor_map::TensorMapper;
use crate::Error;
use crate::architectures::Blueprint;
use crate::loader::delta_net::qkv_gate_rows;
use crate::loader::tensor_finder::ModulePath;

/// Returns the value heads of a folder in the order of the file, each as `len` adjacent indices from `start` on.
fn reordered(shape: DeltaNetShape, order: ValueHeadOrder, start: usize, len: usize) -> Vec<usize> {
    let mut source = vec![0; shape.num_value_heads];
    for key_head in 0..shape.num_key_heads {
        for i in 0..shape.values_per_key() {
            source[order.value_head(shape, key_head, i)] = ValueHeadOrder::Grouped.value_head(shape, key_head, i);
        }
    }
    source.into_iter().flat_map(|head| start + head * len..start + (head + 1) * len).collect()
}

impl TensorMapper<'_> {
    pub(super) fn delta_net(&mut self, layer: usize) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let shape = config.delta_net.expect("checked with the configuration");
        let (to, hidden, heads) = (self.target, config.hidden_size, shape.num_value_heads);
        let (channels, width) = (shape.num_channels(), shape.output_size());
        // First, because a damaged configuration names more channels than fit into memory, and the file has no such
        // convolution.
        let convolution = ModulePath::new(names.delta_convolution, layer);
        let dtype = self.finder.taps(convolution, channels, shape.num_taps)?.info.dtype;
        let order = |start: usize, len: usize| reordered(shape, self.order, start, len);
        let values = order(channels - width, shape.value_size);
        let channel_rows: Vec<usize> = (0..channels - width).chain(values).collect();
        let (head_rows, gate_rows) = (order(0, 1), order(0, shape.value_size));
        let columns = gate_rows.clone();

        let qkv_gate = ModulePath::new(names.delta_qkv_gate, layer);
        if self.finder.exists(qkv_gate) {
            let name = self.finder.name(qkv_gate, "weight");
            let [qkv, gate] = qkv_gate_rows(shape);
            let total = [channels + width, hidden];
            self.gathered((name.clone(), &total), to.delta_qkv, layer, &[channels, hidden], qkv)?;
            self.gathered((name, &total), to.delta_gate, layer, &[width, hidden], gate)?;
        } else {
            let name = |template: &'static str| self.finder.name(ModulePath::new(template, layer), "weight");
            let (qkv, gate) = (name(names.delta_qkv), name(names.delta_gate));
            let (qkv_shape, gate_shape) = ([channels, hidden], [width, hidden]);
            self.gathered((qkv, &qkv_shape), to.delta_qkv, layer, &qkv_shape, channel_rows.clone())?;
            self.gathered((gate, &gate_shape), to.delta_gate, layer, &gate_shape, gate_rows)?;
        }
        if self.finder.exists(ModulePath::new(names.delta_beta_time_step, layer)) {
            self.linear((names.delta_beta_time_step, to.delta_beta_time_step), layer, 2 * heads, hidden)?;
        } else {
            for (from, to) in [(names.delta_beta, to.delta_beta), (names.delta_time_step, to.delta_time_step)] {
                let name = self.finder.name(ModulePath::new(from, layer), "weight");
                self.gathered((name, &[heads, hidden]), to, layer, &[heads, hidden], head_rows.clone())?;
            }
        }
        let recipe = TensorRecipe::Gathered { name: self.finder.name(convolution, "weight"), rows: channel_rows };
        let target = ModulePath::new(to.delta_convolution, layer).name("weight");
        self.push(target, dtype, &[channels, shape.num_taps], recipe);
        self.delta_net_vectors(layer, shape, head_rows)?;

        let name = self.finder.name(ModulePath::new(names.delta_output, layer), "weight");
        let dtype = self.finder.shaped(&name, &[hidden, width])?.info.dtype;
        if dtype.is_quantized() {
            return Err(Error::BadSetting {
                key: format!("tensor \"{name}\""),
                expected: "an unquantized format, because its columns are reordered".into(),
                found: dtype.to_string(),
            });
        }
        let target = ModulePath::new(to.delta_output, layer).name("weight");
        self.push(target, dtype, &[hidden, width], TensorRecipe::GatheredColumns { name, columns });
        Ok(())
    }

    fn delta_net_vectors(&mut self, layer: usize, shape: DeltaNetShape, heads: Vec<usize>) -> Result<(), Error> {
        let (names, to) = (&self.source.names, self.target);
        let name = self.finder.name(ModulePath::new(names.delta_decay, layer), "");
        let dtype = self.finder.shaped(&name, &[heads.len()])?.info.dtype;
        let recipe = TensorRecipe::DecayRates { name, heads: heads.clone() };
        self.push(ModulePath::new(to.delta_decay, layer).name(""), dtype, &[heads.len()], recipe);

        let name = self.finder.name(ModulePath::new(names.delta_time_bias, layer), "");
        let dtype = self.finder.shaped(&name, &[heads.len()])?.info.dtype;
        let target = ModulePath::new(to.delta_time_bias, layer).name("");
        let len = [heads.len()];
        self.push(target, dtype, &len, TensorRecipe::Gathered { name, rows: heads });

        let name = self.finder.name(ModulePath::new(names.delta_norm, layer), "weight");
        self.take(name, ModulePath::new(to.delta_norm, layer).name("weight"), &[shape.value_size])
    }

    /// Adds rows of a matrix. `from` is its name in the folder with its shape there.
    fn gathered(
        &mut self,
        (name, stored): (String, &[usize]),
        to: &'static str,
        layer: usize,
        shape: &[usize],
        rows: Vec<usize>,
    ) -> Result<(), Error> {
        let dtype = self.finder.shaped(&name, stored)?.info.dtype;
        let target = ModulePath::new(to, layer).name("weight");
        self.push(target, dtype, shape, TensorRecipe::Gathered { name, rows });
        Ok(())
    }
}
