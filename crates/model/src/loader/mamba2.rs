//! Loads Mamba-2 layers.

use pellucid_tensor::{Mamba2Shape, Tensor, quant};

use super::Loader;
use super::delta_net::decay_rate;
use super::tensor_finder::ModulePath;
use crate::Error;
use crate::architectures::Blueprint;
use crate::ranks::{Columns, WeightRows};
use crate::weights::Mamba2Weights;

/// Returns the numbers of rows of the parts of the input projection, in their order: gate, channels and time steps.
pub(crate) fn input_rows(shape: Mamba2Shape) -> [usize; 3] {
    [shape.output_size(), shape.num_channels(), shape.num_heads]
}

impl Loader<'_> {
    pub(super) fn mamba2(&mut self, layer: usize) -> Result<Mamba2Weights, Error> {
        let Blueprint { config, names, delta_net: storage, .. } = self.blueprint;
        let shape = config.mamba2.expect("checked with the configuration").shape;
        let (hidden, sharing) = (config.hidden_size, self.sharing);
        let [channels, outputs, heads] = [Columns::RecurrentInput, Columns::RecurrentOutput, Columns::RecurrentHeads]
            .map(|columns| sharing.rows(columns));
        let width = outputs.total;
        let path = |template: &'static str| ModulePath::new(template, layer);
        let [gate, input, time_step] =
            self.fused(path(names.mamba_input), [outputs, channels.clone(), heads.clone()], hidden)?;
        let mut decay = self.flat(path(names.mamba_decay), "", &heads)?;
        if storage.log_decay {
            decay.iter_mut().for_each(|rate| *rate = decay_rate(*rate));
        }
        let convolution = path(names.mamba_convolution);
        Ok(Mamba2Weights {
            input,
            gate,
            time_step,
            time_bias: self.flat_vector(path(names.mamba_time_bias), "", &heads)?,
            decay: self.vector(&decay)?,
            skip: self.flat_vector(path(names.mamba_skip), "", &heads)?,
            taps: self.taps(convolution, &channels, shape.num_taps)?,
            bias: self.bias(convolution, &channels)?,
            norm: self.flat_vector(path(names.mamba_norm), "weight", &sharing.mamba2_norm_rows(shape.norm_size))?,
            output: self.linear(path(names.mamba_output), sharing.rows(Columns::Hidden), width)?,
        })
    }

    fn flat_vector(&mut self, path: ModulePath, ending: &str, rows: &WeightRows) -> Result<Tensor, Error> {
        let values = self.flat(path, ending, rows)?;
        self.vector(&values)
    }

    /// Returns this rank's values of a tensor that files of one kind keep as a vector, and those of the other as a
    /// matrix.
    fn flat(&mut self, path: ModulePath, ending: &str, rows: &WeightRows) -> Result<Vec<f32>, Error> {
        let name = self.finder.name(path, ending);
        let tensor = self.finder.flat(&name, rows.total)?;
        let mut values = vec![0.0; rows.total];
        quant::decode(tensor.info.dtype, &tensor.bytes(), &mut values);
        Ok(rows.select(&values))
    }
}
