//! Maps the tensors of Mamba-2 layers. GGUF files have the values of heads as columns, and a row of norm weights for
//! each group.

use pellucid_tensor::DType;

use super::recipe::TensorRecipe;
use super::tensor_map::TensorMapper;
use crate::Error;
use crate::architectures::Blueprint;
use crate::loader::mamba2::input_rows;
use crate::loader::tensor_finder::ModulePath;

impl TensorMapper<'_> {
    pub(super) fn mamba2(&mut self, layer: usize) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let shape = config.mamba2.expect("checked with the configuration").shape;
        let (to, hidden, heads, width) = (self.target, config.hidden_size, shape.num_heads, shape.output_size());
        let channels = shape.num_channels();
        self.linear((names.mamba_input, to.mamba_input), layer, input_rows(shape).iter().sum(), hidden)?;

        let path = ModulePath::new(names.mamba_convolution, layer);
        let dtype = self.finder.taps(path, channels, shape.num_taps)?.info.dtype;
        let recipe = TensorRecipe::Unchanged { name: self.finder.name(path, "weight") };
        let target = ModulePath::new(to.mamba_convolution, layer);
        self.push(target.name("weight"), dtype, &[channels, shape.num_taps], recipe);
        let bias = self.finder.name(path, "bias");
        if self.finder.has(&bias) {
            self.take(bias, target.name("bias"), &[channels])?;
        }

        let name = self.finder.name(ModulePath::new(names.mamba_decay, layer), "");
        self.finder.shaped(&name, &[heads])?;
        let recipe = TensorRecipe::DecayRates { name, heads: (0..heads).collect() };
        self.push(ModulePath::new(to.mamba_decay, layer).name(""), DType::F32, &[heads, 1], recipe);
        let time_bias = self.finder.name(ModulePath::new(names.mamba_time_bias, layer), "");
        self.take(time_bias, ModulePath::new(to.mamba_time_bias, layer).name(""), &[heads])?;
        let groups = [shape.num_groups, width / shape.num_groups];
        for (from, ending, to, len, stored) in [
            (names.mamba_skip, "", to.mamba_skip, heads, [heads, 1]),
            (names.mamba_norm, "weight", to.mamba_norm, width, groups),
        ] {
            let name = self.finder.name(ModulePath::new(from, layer), ending);
            let dtype = self.finder.shaped(&name, &[len])?.info.dtype;
            let target = ModulePath::new(to, layer).name(ending);
            self.push(target, dtype, &stored, TensorRecipe::Unchanged { name });
        }
        self.linear((names.mamba_output, to.mamba_output), layer, hidden, width)
    }
}
